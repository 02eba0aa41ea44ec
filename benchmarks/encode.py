"""From recorded events to OTLP bytes and to Chrome JSON."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from harness import KINETO, OURS, Budget, Row, Settings, file_in_memory, in_turn, rows, timed
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from recorders import kineto, ours
from workloads import small_training

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TRAINING_STEPS = 400
_SDK_SPANS = 2_048
_SDK_BATCH = 512
"""As many as the SDK's BatchSpanProcessor sends at a time."""
_ROUNDS = 15
_SDK = "SDK: spans made and encoded"
_SDK_ENCODING = "SDK: encoding alone"
_OURS_ENCODING = "otel-torchprof: encoding alone"


def measure(settings: Settings) -> list[Row]:
    """Per span and per event, each in the form that the peer can do best."""
    rounds = settings.rounds_or(_ROUNDS)
    return [*_otlp(rounds), *_otlp_with_shapes(rounds), *_chrome(rounds)]


def _otlp(rounds: int) -> list[Row]:
    like = list(_recorded().spans()[:_SDK_SPANS])
    spans = _sdk_spans(like)
    costs = in_turn(
        {
            _SDK: lambda: timed(lambda: _sdk_bytes(_sdk_spans(like)), len(like)),
            _SDK_ENCODING: lambda: timed(lambda: _sdk_bytes(spans), len(like)),
            OURS: lambda: _ours()[0],
            _OURS_ENCODING: lambda: _ours()[1],
        },
        rounds,
    )
    budgets = {OURS: Budget(_SDK, 1 / 120), _OURS_ENCODING: Budget(_SDK_ENCODING, 1 / 100)}
    return rows("OTLP bytes, per span", "ns", costs, budgets)


def _otlp_with_shapes(rounds: int) -> list[Row]:
    like = list(_recorded(shapes=True).spans()[:_SDK_SPANS])
    costs = in_turn(
        {
            _SDK: lambda: timed(lambda: _sdk_bytes(_sdk_spans(like)), len(like)),
            OURS: lambda: _ours(shapes=True)[0],
        },
        rounds,
    )
    return rows("OTLP bytes with shapes, per span", "ns", costs, {OURS: Budget(_SDK, 1 / 100)})


def _recorded(*, shapes: bool = False) -> Any:
    with ours(shapes=shapes) as prof:
        small_training(_TRAINING_STEPS)
    return prof


def _ours(*, shapes: bool = False) -> tuple[float, float]:
    """Nanoseconds per span with everything after the columns (ids, parents, attributes, bytes), and of the bytes alone."""
    prof = _recorded(shapes=shapes)
    count = len(prof.columns["start"]) + 1
    return timed(lambda: _consumed(prof.to_otlp()), count), timed(lambda: _consumed(prof.to_otlp()), count)


def _consumed(pieces: Iterable[bytes]) -> None:
    deque(pieces, maxlen=0)


def _sdk_spans(like: Sequence[ReadableSpan]) -> list[Any]:
    """The same spans as the SDK makes them: named, timed, with attributes, under one parent, exported by nobody."""
    tracer = TracerProvider(resource=Resource.get_empty()).get_tracer("benchmark")
    context = trace.set_span_in_context(tracer.start_span("root"))
    made = []
    for span in like:
        new = tracer.start_span(span.name, context, attributes=span.attributes, start_time=span.start_time)
        new.end(span.end_time)
        made.append(new)
    return made


def _sdk_bytes(spans: Sequence[Any]) -> None:
    for first in range(0, len(spans), _SDK_BATCH):
        encode_spans(spans[first : first + _SDK_BATCH]).SerializeToString()


def _chrome(rounds: int) -> list[Row]:
    with file_in_memory() as path:
        costs = in_turn({KINETO: lambda: _chrome_of(kineto, path), OURS: lambda: _chrome_of(ours, path)}, rounds)
    return rows("Chrome JSON after stop, per event", "ns", costs, {OURS: Budget(KINETO, 1 / 4)})


def _chrome_of(recorder: Any, path: str) -> float:
    with recorder() as prof:
        small_training(_TRAINING_STEPS)
    took = timed(lambda: prof.export_chrome_trace(path))
    return took / len(prof.function_events)
