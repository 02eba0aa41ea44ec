"""Which steps and other segments of a training job are slow: by kind, without a recording."""

from __future__ import annotations

import random

import pytest

from otel_torchprof._columns.phases import Segment
from otel_torchprof._export.span_policy import SelectionRules, TailSampler
from otel_torchprof._model.limits import Budget
from otel_torchprof._model.step_spans import StepSpan, Trace

MS = 1_000_000


class Job:
    """Segments as they end, each decided on by itself."""

    def __init__(self, quantile=0.95, limit_ns=None):
        self.sampler = TailSampler(SelectionRules(Budget(), keep_all=False, quantile=quantile, limit_ns=limit_ns))
        self.noise = random.Random(20)
        self.now = self.ids = self.steps = 0

    def span(self, segment, ms, *, context=False):
        """A span of a segment; ``context``: of the same one as the last, for what happened of it in a context."""
        self.ids += 1
        number = self.steps if segment is Segment.STEP else -1
        self.steps += segment is Segment.STEP
        link = (1, self.ids - 2 if context else self.ids - 1)
        end = self.now + round(ms * MS)
        span = StepSpan(number, Trace(1, True, True), self.ids, self.now, end, None, link, name=segment.span_name)
        span.segment, span.thread, self.now = segment, None if context else 1, end
        return span

    def keeps(self, segment, ms, spread=0.0):
        """Whether a segment of about so many ms keeps its detail."""
        span = self.span(segment, ms * (1 + self.noise.uniform(-spread, spread)))
        return self.sampler.of_steps([span], ())[span.span_id]


@pytest.mark.parametrize("stalled", [4, 19, 20, 35, 100, 199])
@pytest.mark.parametrize("first", [3, 500])
def test_a_stall_is_kept(stalled, first):
    """One of 200 steps of 3 ms that took 20 ms is kept, also early, and after a first one that took long to warm up; few others are."""
    job = Job()
    durations = [first, *[3] * 199]
    durations[stalled] = 20
    kept = [number for number, ms in enumerate(durations) if job.keeps(Segment.STEP, ms, spread=0.1)]
    assert stalled in kept
    assert len(kept) <= 0.1 * 200


def test_few_of_few_evaluations_are_kept():
    """Of ten evaluations of 40 ms with some ms of noise at most two are kept, among steps that are much shorter."""
    job = Job()
    kept = 0
    for _ in range(10):
        for _ in range(20):
            job.keeps(Segment.STEP, 3, spread=0.1)
        kept += job.keeps(Segment.EVALUATION, 40, spread=0.1)
    assert kept <= 2


def test_evaluations_do_not_own_the_quantile_of_steps():
    """With an evaluation of 100 ms after every fifth step, a step of 20 ms among those of 3 ms is kept; so is an evaluation of 400 ms."""
    job = Job()
    for number in range(150):
        job.keeps(Segment.STEP, 3, spread=0.1)
        if number % 5 == 0:
            job.keeps(Segment.EVALUATION, 100, spread=0.1)
    assert job.keeps(Segment.STEP, 20)
    assert not job.keeps(Segment.EVALUATION, 100)
    assert job.keeps(Segment.EVALUATION, 400)


def test_nothing_is_slow_among_two():
    """The third of its kind is not slow, whatever it took: of two, one may have been a warm-up."""
    job = Job()
    assert not any(job.keeps(Segment.CHECKPOINT, ms) for ms in (10, 10, 1000))


def test_the_limit_holds_from_the_first_on():
    """A segment from the limit on is kept, whatever its kind and however few there were; so it is without a quantile."""
    for quantile in (0.95, None):
        job = Job(quantile, limit_ns=50 * MS)
        assert [job.keeps(kind, ms) for kind in (Segment.STEP, Segment.CHECKPOINT) for ms in (10, 60)] == [
            False,
            True,
        ] * 2


def test_without_a_quantile_no_median_decides():
    """With neither a quantile nor a limit nothing is slow."""
    job = Job(quantile=None)
    assert not any(job.keeps(Segment.STEP, ms) for ms in (3, 3, 3, 300))


def test_set_up_is_kept():
    """There is one, and it is what nobody can see a second time."""
    assert Job().keeps(Segment.SETUP, 5000)


def test_segments_without_numbers_are_decided_on_apart():
    """Two evaluations that end in one drain do not share their decision, and what happened of each in a context shares its own."""
    job = Job(quantile=None, limit_ns=50 * MS)
    quick = [job.span(Segment.EVALUATION, 10), job.span(Segment.EVALUATION, 10, context=True)]
    slow = [job.span(Segment.EVALUATION, 60), job.span(Segment.EVALUATION, 10, context=True)]
    found = job.sampler.of_steps([*quick, *slow], ())
    assert [found[span.span_id] for span in (*quick, *slow)] == [False, False, True, True]
    assert job.sampler.figures == {"sampled": 1, "root_only": 1}


def test_what_is_asked_for_where_nothing_has_segments():
    """The latest moments are remembered, and not all of them for ever."""
    job = Job()
    for now in range(10_000):
        job.sampler.ask(now)
    assert len(job.sampler._asked) < 10_000
    job.now = 9_990
    assert job.keeps(Segment.STEP, 1)
    assert not job.sampler._asked
