"""What a call of generate says of itself: times that are known, and whose span has the conventions' attributes."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from recorded_tables import recorded_table

from otel_torchprof import ChromeTraceExporter, OTLPFileExporter
from otel_torchprof._cli.show import TraceSums, read
from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.generation import Generation
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import Kind
from otel_torchprof._encode.attributes import add_attributes
from otel_torchprof._encode.spans import SpanList
from otel_torchprof._files.event_columns import events_of_spans
from otel_torchprof._record import generations
from otel_torchprof._record.generations import Generations

CALL = Generation("tiny", 2, 10, 1, 8, 4, False, 1.0, 0.4)


@pytest.mark.parametrize(
    ("call", "first", "further"),
    [
        (CALL, 0.4, 0.2),
        (CALL._replace(new_tokens=1, first_token=None), 1.0, None),
        (CALL._replace(new_tokens=2), 0.4, 0.6),
        (CALL._replace(first_token=None), None, None),
        (CALL._replace(new_tokens=None), 0.4, None),
        (CALL._replace(new_tokens=0, first_token=None), None, None),
    ],
    ids=["four tokens", "one", "two", "nobody saw the first", "no result", "none"],
)
def test_times(call, first, further):
    """The time to the first token and per further one; none where it is not known or there is no such token."""
    assert call.time_to_first_token == first
    assert call.time_per_output_token == (None if further is None else pytest.approx(further))


def test_tokens_per_second(monkeypatch):
    """Tokens are those of the requests that ended in the last ten seconds, from the begin of the first on, or of the last request."""
    known, second = Generations(), 10**9
    assert known.token_rate(100 * second) is None
    for end, call in ((80, CALL), (95, CALL._replace(duration=5.0)), (98, CALL), (99, CALL._replace(is_request=False))):
        monkeypatch.setattr(generations.time, "time_ns", lambda end=end: end * second)
        known.note(0, call)
    assert known.token_rate(100 * second) == pytest.approx(16 / 10)
    assert known.token_rate(117 * second) == pytest.approx(8 / 20)
    known.after_fork_in_child()
    assert known.token_rate(100 * second) is None


def test_attributes_are_on_one_span():
    """What the conventions have is on the span of a request that nobody else has one for; what is ours is on each."""
    assert CALL.attributes() == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "huggingface.transformers",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 8,
        "torch.generate.batch_size": 2,
        "torch.generate.time_to_first_token": 0.4,
        "torch.generate.time_per_output_token": pytest.approx(0.2),
    }
    own = {key for key in CALL.attributes() if key.startswith("torch.")}
    assert CALL._replace(has_own_span=True).attributes().keys() == own
    assert CALL._replace(is_request=False).attributes().keys() == own
    assert CALL.missing_in({"gen_ai.request.model", *own}).keys() == CALL.attributes().keys() - {
        "gen_ai.request.model",
        *own,
    }


def spans_of(call):
    """The spans of a profile that has one call of generate."""
    columns = {
        "start": [1],
        "end": [9],
        "name": [1],
        "parent": [-1],
        "kind": [Kind.PHASE],
        "fwd_thread": [Part.GENERATE],
    }
    batch = Batch.of(columns, ["", Part.GENERATE.event_name], generations={1: call})
    ids = itertools.count(1)
    table = recorded_table(
        batch, start=0, end=10, steps=[], new_trace_id=lambda: next(ids), new_span_id=lambda: next(ids)
    )
    return SpanList(add_attributes(table, batch), resource=Resource({}), scope=InstrumentationScope(""))


@pytest.mark.parametrize(
    ("call", "hidden", "name"),
    [
        (CALL, "", "text_completion tiny"),
        (CALL, "gen_ai.request.model", "text_completion"),
        (CALL, "gen_ai.operation.name", "torch.phase.generate"),
        (CALL._replace(has_own_span=True), "", "torch.phase.generate"),
        (CALL._replace(is_request=False), "", "torch.phase.generate"),
    ],
    ids=["a request", "hidden model", "hidden operation", "somebody else's", "an assistant"],
)
def test_the_span_is_named_as_the_conventions_say(monkeypatch, call, hidden, name):
    """Where it has their attributes, by those that are not hidden."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", hidden)
    spans = spans_of(call)
    assert spans[-1].name == name


def test_readers_see_the_phase(tmp_path):
    """In every format, and where spans are in no file: `show`, `explain` and `diff` count calls of all models as one phase."""
    spans = spans_of(CALL)
    found = [TraceSums(events_of_spans(spans))]
    for file, kind in (("a.otlp", OTLPFileExporter), ("a.jsonl", OTLPFileExporter), ("a.json", ChromeTraceExporter)):
        exporter = kind(tmp_path / file)
        exporter.export(spans)
        exporter.shutdown()
        found.append(read(str(tmp_path / file))[0])
    assert [{row.name for row in sums.averages()} for sums in found] == [
        {Part.GENERATE.event_name, "torch.profile"}
    ] * 4


def test_only_the_latest_calls_are_remembered(monkeypatch):
    """Memory is bounded where nobody drains; an assistant's calls are told to nobody."""
    monkeypatch.setattr(generations, "_MOST", 2)
    known, told = Generations(), []
    known.listen(told.append)
    for event in (1, 2, 3):
        known.note(event, CALL)
    known.note(0, CALL._replace(is_request=False))
    assert known.known_among([1, 2, 3, 0]) == {2: CALL, 3: CALL}
    assert told == [CALL] * 3
    known.leave(told.append)
    known.note(4, CALL)
    assert len(told) == 3
