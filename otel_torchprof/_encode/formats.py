"""The formats that a profile can be written in, by name. A new one is a file beside this one, and a line in :data:`FORMATS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import chrome, otlp, otlp_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._spans.step_spans import RecordedStep
    from otel_torchprof._tree.span_table import SpanTable


@dataclass(frozen=True)
class Recorded:
    """What was recorded, as formats get it."""

    batch: Batch
    """All events. :func:`~otel_torchprof._tree.nesting.nested_rows` has those that nest, by thread."""
    steps: list[RecordedStep]
    """Those that are no events."""
    spans: Callable[[], SpanTable]
    """The same as spans, made when it is called."""
    resource: Callable[[], Resource]
    scope: Callable[[], InstrumentationScope]
    devices_of: Batch | None = None
    """Whose device times are written, where those of ``batch`` are not."""
    metadata: Mapping[str, Any] | None = None
    """What the user adds."""
    call_stacks: bool = False
    """Whether each event gets its stack as text."""
    window: tuple[int, int] | None = None
    """When it began and ended, Unix ns."""


def _chrome(recorded: Recorded) -> Iterable[bytes]:
    return chrome.encode(
        recorded.batch,
        steps=recorded.steps,
        metadata=recorded.metadata,
        call_stacks=recorded.call_stacks,
        devices_of=recorded.devices_of,
        window=recorded.window,
    )


def _otlp(recorded: Recorded) -> Iterable[bytes]:
    return otlp.encode(recorded.spans(), resource=recorded.resource(), scope=recorded.scope())


def _otlp_json(recorded: Recorded) -> Iterable[bytes]:
    lines = otlp_json.encode_counted(recorded.spans(), resource=recorded.resource(), scope=recorded.scope())
    return (line for line, _ in lines)


FORMATS: Mapping[str, Callable[[Recorded], Iterable[bytes]]] = {
    "chrome": _chrome,
    "otlp": _otlp,
    "otlp_json": _otlp_json,
}
"""By name; each gives the pieces of a file."""
