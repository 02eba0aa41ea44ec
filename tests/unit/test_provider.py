"""What a TracerProvider decides, and what is done when its parts fail."""

from __future__ import annotations

import logging
import random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import TraceState

from otel_torchprof._export.provider import Provider
from otel_torchprof._model.step_spans import Trace


class Answers(Sampler):
    """Gives one answer to everything, or raises it."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked = []

    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None):  # noqa: PLR0917 - the SDK's
        self.asked.append((name, attributes, [link.context.span_id for link in links]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def get_description(self):
        return "Answers"


class Ids(IdGenerator):
    """Gives one id for everything, or raises it."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def generate_trace_id(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    generate_span_id = generate_trace_id


def provider_with(**options) -> Provider:
    return Provider(TracerProvider(shutdown_on_exit=False, **options))


def test_the_sampler_is_told_of_the_step_and_its_link():
    """It is asked with the name, the number and the link of a step; what it answers is taken as it is."""
    sampler = Answers(SamplingResult(Decision.RECORD_AND_SAMPLE, {"why": "first"}, TraceState([("vendor", "1")])))
    trace = provider_with(sampler=sampler).new_trace("torch.step", 3, (7, 8))
    assert trace == Trace(trace.trace_id, True, True, "vendor=1", {"why": "first"})
    assert sampler.asked == [("torch.step", {"torch.step.number": 3}, [8])]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (ALWAYS_ON, (True, True)),
        (ALWAYS_OFF, (False, False)),
        (TraceIdRatioBased(1.0), (True, True)),
        (TraceIdRatioBased(0.0), (False, False)),
        (Answers(SamplingResult(Decision.RECORD_ONLY)), (True, False)),
    ],
)
def test_decisions(sampler, expected):
    """What is to be recorded only counts in sums and is not sent."""
    trace = provider_with(sampler=sampler).new_trace("mm", -1, (7, 8))
    assert (trace.recorded, trace.exported) == expected


@pytest.mark.parametrize(
    "answer", [ArithmeticError("no answer"), None, SamplingResult(Decision.DROP, trace_state="a=1")]
)
def test_a_sampler_that_fails_has_said_yes(answer, caplog):
    """A sampler that raises, or answers nonsense, stops nobody: what it was asked about is recorded, and the log says so once."""
    provider = provider_with(sampler=Answers(answer))
    with caplog.at_level(logging.ERROR, "otel_torchprof"):
        traces = [provider.new_trace("mm", -1, None) for _ in range(3)]
    assert all((trace.recorded, trace.exported) == (True, True) for trace in traces)
    assert len(caplog.records) == 1
    assert "the sampler failed on 'mm'" in caplog.text


@pytest.mark.parametrize("answer", [ArithmeticError("no id"), 0, -1, 1 << 128, None, "1"])
def test_ids_are_valid_whatever_the_generator_gives(answer, caplog):
    """An id generator that raises, or gives what is no id, is replaced by random ids, and the log says so once."""
    provider = provider_with(id_generator=Ids(answer))
    with caplog.at_level(logging.ERROR, "otel_torchprof"):
        span_ids = {provider.new_span_id() for _ in range(3)}
        trace_ids = {provider.new_trace("mm", -1, None).trace_id for _ in range(3)}
    assert len(span_ids) == len(trace_ids) == 3
    assert all(0 < span_id < 1 << 64 for span_id in span_ids)
    assert all(0 < trace_id < 1 << 128 for trace_id in trace_ids)
    assert len(caplog.records) == 1
    assert "the id generator 'Ids'" in caplog.text


def test_programs_that_seed_their_random_numbers():
    """Seeded alike, two ranks do not get the same ids; and a program's random numbers are the same as without a profiler."""
    provider, ids = provider_with(), []
    for _ in range(2):
        random.seed(0)
        ids += [provider.new_span_id(), provider.new_trace("mm", -1, None).trace_id]
        following = random.random()
    assert len(set(ids)) == 4
    random.seed(0)
    assert random.random() == following
