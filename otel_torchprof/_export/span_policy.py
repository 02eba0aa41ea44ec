"""``SpanPolicy``: which steps are traced in full, and how large their traces may be."""

from __future__ import annotations

import bisect
import os
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config
from otel_torchprof._columns.phases import Segment
from otel_torchprof._model.limits import Budget
from otel_torchprof.errors import checked

from .cycles import ProfilerAction, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from otel_torchprof._model.step_spans import StepSpan

# ---- Selection of the steps that are traced in full, before they begin, by number and trace id ----

_LOW_BITS = (1 << 64) - 1


class StepChoice(NamedTuple):
    """Selects steps; all three rules must select a step. Immutable; ``schedule`` may be user code."""

    schedule: Callable[[int], bool] | None = None
    every: int = 1
    ratio: float = 1.0

    @property
    def is_all(self) -> bool:
        """Whether every step is selected."""
        return self.schedule is None and self.every == 1 and self.ratio >= 1

    def selects(self, step: int, trace_id: int) -> bool:
        """Whether the step of that number (from 0) and trace is traced in full. A microsecond and the schedule's own time.

        The share is taken as OpenTelemetry's ``TraceIdRatioBased`` takes it: by the lower 64 bits of the trace id, which are random
        for everybody. So of a step that a provider samples at 10 %, this at 1 % takes every tenth, and none of those that it does not.
        """
        if step < 0:
            return True
        if self.every > 1 and step % self.every:
            return False
        if self.ratio < 1 and (trace_id & _LOW_BITS) >= round(self.ratio * (1 << 64)):
            return False
        return self.schedule is None or self.schedule(step)


_MOST_TRACES = 10_000
"""Traces whose selection is stored, for events of later drains."""


class TraceChoice:
    """Selects traces where there are no steps: each takes the place of a step. Not thread-safe; memory is bounded.

    Args:
        selects: whether the trace with a number (from 0) and an id is selected.
    """

    def __init__(self, selects: Callable[[int, int], bool]) -> None:
        self._selects = selects
        self._known: OrderedDict[int, bool] = OrderedDict()
        self.count = self.left_out = 0
        """Traces so far, and those that are not selected."""

    def selects(self, trace_id: int) -> bool:
        """Whether a trace is selected; every call has the same answer."""
        if (is_selected := self._known.get(trace_id)) is None:
            is_selected = self._known[trace_id] = self._selects(self.count, trace_id)
            self.count += 1
            self.left_out += not is_selected
            if len(self._known) > _MOST_TRACES:
                self._known.popitem(last=False)
        return is_selected


_OPTIONS = config.fields_in(config.POLICY)
_DETAILED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_SCHEDULE_KEYS = tuple(option.key for option in config.SCHEDULE)


@dataclass(frozen=True)
class SpanPolicy:
    """Sampling policy and trace size limits of a training job, which has a hundred thousand events per second.

    Makes three decisions, in this order. *Before* a step: whether it is traced in full. ``schedule``, ``every`` and
    ``ratio`` must all select it. *After* it, tail sampling: whether its detail is sampled (``keep``). *Then*: which
    spans fit into its trace (``max_spans``, ``max_bytes``, ``short``). A step that is not selected or not sampled still
    has its step span, if the provider's sampler samples it. Without steps, the first decision counts traces, such as
    those of requests, and is made after them: of one that is not selected, top-level modules, labels and operators
    still have their spans, and those with an error all. ``keep`` then applies to each of these instead of a step.

    Immutable, so threads may share it. ``docs/backends.md`` is the guide.

    Args:
        schedule: function from the number of a step to a :class:`ProfilerAction`, as for :class:`profile`; see
            :func:`schedule`. Default: every step.
        every: selects every n-th step, from step 0 on. Default: 1. Operators of the other steps are not even recorded once
            the loop goes round the same way, as of those that ``schedule`` and ``ratio`` leave out; averages then have none
            of them.
        ratio: share of the steps, above 0, up to 1, selected by trace id as OpenTelemetry's ``TraceIdRatioBased`` does:
            together with a provider that samples by ratio the smaller ratio applies, not the product. Default: 1.
        keep: ``"all"``, or ``"slow"``: samples only steps that are slow, contain an error, or were requested by
            ``TorchInstrumentor().keep_step()``; others are reduced to the step span with its phases and averages. Steps
            are compared with steps, evaluations with evaluations, checkpoints with checkpoints; set-up is always
            sampled. Default: ``"all"``.
        slow_quantile: quantile of the last 200 durations of a kind above which one is slow; None for no such rule.
            Below 20 durations, and while the quantile is their maximum, a duration above three times their median is
            slow, from the fourth on. Default: 0.95.
        slow_limit: seconds from which on a step is always slow. Default: None, no such rule.
        max_spans: limit of spans per trace. Beyond it, runs of short spans of one name are aggregated, then short spans
            are collapsed into their parents, then the trace is split into linked traces (``docs/spans.md``). Default:
            5,000. A process takes a quarter of this limit, and of the next, in a trace that began in another process.
        max_bytes: size limit of a trace as OTLP, in bytes, with the same effect. Default: 4,000,000.
        short: seconds below which spans may be aggregated and collapsed. Default: None, the step's duration divided by
            ``max_spans``, which no display of the trace can resolve.
        job_interval: seconds after which the job span ends and the next one begins; 0 for no job spans. Default: 600.

    Raises:
        TypeError, ValueError: a bad argument; the message has its name, its value and the allowed values.

    Examples:
        >>> policy = otp.SpanPolicy(every=10, keep="slow", slow_limit=1.5)
        >>> policy.max_spans
        5000
        >>> otp.SpanPolicy(ratio=2)
        Traceback (most recent call last):
            ...
        ValueError: ratio is 2; it must be a number above 0, up to 1
    """

    schedule: Callable[[int], Any] | None = None
    every: int = config.EVERY.fallback
    ratio: float = config.RATIO.fallback
    keep: str = config.KEEP.fallback
    slow_quantile: float | None = config.SLOW_QUANTILE.fallback
    slow_limit: float | None = config.SLOW_LIMIT.fallback
    max_spans: int = config.MAX_SPANS.fallback
    max_bytes: int = config.MAX_TRACE_BYTES.fallback
    short: float | None = config.SHORT.fallback
    job_interval: float = config.JOB_INTERVAL.fallback

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(f"schedule is {self.schedule!r}; it must be a callable such as schedule(wait=1, ...) gives")
        for name, option in _OPTIONS.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), option.check))

    @classmethod
    def from_environment(cls) -> SpanPolicy:
        """Returns the policy in ``OTEL_TORCHPROF_POLICY``; bad parts of it are ignored, with one warning each."""
        fields: dict[str, Any] = {name: option.read() for name, option in _OPTIONS.items()}
        return cls(**fields, schedule=_schedule_of_environment())

    def choice(self) -> StepChoice:
        """Returns the selection of steps that are traced in full, in internal form."""
        given = self.schedule
        return StepChoice(None if given is None else lambda step: given(step) in _DETAILED, self.every, self.ratio)

    def rules(self) -> SelectionRules:
        """Returns the tail sampling rules and size limits, in internal form."""
        return SelectionRules(
            Budget(self.max_spans, self.max_bytes, self.short),
            keep_all=self.keep == "all",
            quantile=self.slow_quantile,
            limit_ns=None if self.slow_limit is None else round(self.slow_limit * 1e9),
        )


def checked_policy(given: SpanPolicy | None) -> SpanPolicy:
    """Returns the given policy, else the environment's.

    Raises:
        TypeError: ``given`` is not a SpanPolicy.
    """
    if given is None:
        return SpanPolicy.from_environment()
    if not isinstance(given, SpanPolicy):
        options = ", ".join(f"{option.name}=" for option in fields(SpanPolicy))
        raise TypeError(f"policy is {given!r}; it must be a SpanPolicy({options}), or None")
    return given


def policy_without_code() -> SpanPolicy:
    """Returns the environment's policy, else ``keep="slow"``, whose volume a backend on a laptop can store."""
    return SpanPolicy.from_environment() if os.environ.get(config.POLICY, "").strip() else SpanPolicy(keep="slow")


def schedule_of(text: str) -> Callable[[int], Any]:
    """Parses a schedule: ``wait=5,warmup=1,active=3,repeat=2``.

    Raises:
        ValueError: the text has another form.
    """
    numbers = dict.fromkeys(_SCHEDULE_KEYS, 0)
    for item in text.split(","):
        key, _, number = item.partition("=")
        if key.strip() not in _SCHEDULE_KEYS or not number.strip().isdecimal():
            raise ValueError(
                f"schedule is {text!r}; allowed is wait=N,warmup=N,active=N,repeat=N,skip_first=N, of which active is needed"
            )
        numbers[key.strip()] = int(number)
    if not numbers["active"]:
        raise ValueError(f"schedule is {text!r}; it must say how many steps are active, above 0: active=N")
    return plan(**numbers)


def _schedule_of_environment() -> Callable[[int], Any] | None:
    numbers = {option: option.read() for option in config.SCHEDULE}
    given = {option: number for option, number in numbers.items() if number is not None}
    if given.get(config.ACTIVE):
        return plan(**{option.key: number or 0 for option, number in numbers.items()})
    for option in given:
        option.ignore("a schedule must say how many steps are active, above 0: active=N")
    return None


# ---- Rules of tail sampling ----


WINDOW = 200
"""Number of recent durations with which a new one is compared."""
ENOUGH = 20
"""Fewest durations for a quantile."""
_ENOUGH_FOR_MEDIAN = 3
"""Fewest durations for a median; one of three may be of a warm-up without being the median."""
_MEDIANS = 3
"""With fewer durations, number of medians above which one is slow: noise seldom triples a duration, a stall does."""
_MOST_NAMES = 1000


class SelectionRules(NamedTuple):
    """Rules of tail sampling, and size limits; see :class:`~otel_torchprof.SpanPolicy`."""

    budget: Budget
    keep_all: bool = True
    quantile: float | None = None
    limit_ns: int | None = None


class SlowDetector:
    """Detects slow durations among those of the same name. Not thread-safe; memory is bounded.

    Args:
        quantile: quantile of recent durations above which one is slow; with too few durations, and for 1.0, three times their median.
            None: no such rule.
        limit_ns: duration from which on one is always slow; None: no such rule.
    """

    def __init__(self, quantile: float | None, limit_ns: int | None) -> None:
        self._quantile = quantile
        self._limit_ns = limit_ns
        self._recent: OrderedDict[str, _Recent] = OrderedDict()

    def takes(self, name: str, duration_ns: int) -> bool:
        """Whether a duration is slow; adds it to the recent ones. Costs some microseconds."""
        recent = self._recent.get(name)
        if recent is None:
            recent = self._recent[name] = _Recent()
            if len(self._recent) > _MOST_NAMES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        above = self._quantile is not None and recent.is_above(duration_ns, self._quantile)
        recent.add(duration_ns)
        return above or (self._limit_ns is not None and duration_ns >= self._limit_ns)

    def median(self, name: str) -> int:
        """Median of the recent durations of a name; 0 without any."""
        return self._recent[name].median if name in self._recent else 0


class _Recent:
    """Recent durations, by time and by length."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, duration: int) -> None:
        self._latest.append(duration)
        bisect.insort(self._sorted, duration)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    def is_above(self, duration: int, quantile: float) -> bool:
        """Whether a duration is above the quantile or, while the quantile is the maximum, above a multiple of the median."""
        known = len(self._sorted)
        at = int(quantile * known)
        if known >= ENOUGH and at < known - 1:
            return duration > self._sorted[at]
        return known >= _ENOUGH_FOR_MEDIAN and duration > _MEDIANS * self.median

    @property
    def median(self) -> int:
        """The lower median; there is one duration at least."""
        return self._sorted[(len(self._sorted) - 1) // 2]


# ---- Tail sampling: samples ended steps that were slow, failed or were requested ----

_MOST_ASKED = 1 << 12
"""Most times of requests that are stored until their segment has ended."""


class TailSampler:
    """The tail sampler of one recording. Not thread-safe, except :meth:`ask`."""

    def __init__(self, rules: SelectionRules) -> None:
        self._keeps_all = rules.keep_all
        self._slow = SlowDetector(rules.quantile, rules.limit_ns)
        self._asked: deque[int] = deque(maxlen=_MOST_ASKED)  # Unix ns
        self.figures: Counter[str] = Counter()
        """Trace groups by decision: ``sampled``, ``root_only``."""

    def ask(self, now: int) -> None:
        """Requests that the segment that runs at ``now`` (Unix ns) be sampled. Thread-safe."""
        if not self._keeps_all:  # else the requests would never be read
            self._asked.append(now)

    def of_steps(
        self, ended: Sequence[StepSpan], failed: Collection[int], selects: Callable[[int], bool] = bool
    ) -> dict[int, bool]:
        """Decides which ended segments and ended shared roots of operators are sampled; returns the decisions by trace group.

        All spans of a segment get the same decision. A segment is sampled if it is set-up, has a span in ``failed``, was requested, or
        is slow among segments of its kind: steps among steps, evaluations among evaluations. Only the span that the loop's thread ended
        counts for its duration. A shared root is compared by its longest operator, since its own duration means nothing.

        ``failed``: trace groups that are sampled in any case, such as those with an error. ``selects``: whether a trace is selected,
        of those of shared roots.
        """
        segments = [span for span in ended if span.segment is not None]
        sampled, asked = dict.fromkeys(map(_segment_of, segments), False), tuple(self._asked)
        for span in segments:
            slow = self._keeps_all or (span.thread is not None and self._slow.takes(span.name, span.end - span.start))
            is_asked = any(span.start <= time <= span.end for time in asked)
            has_to_be = span.segment is Segment.SETUP or span.span_id in failed or is_asked
            sampled[_segment_of(span)] |= slow or has_to_be
        latest = max((span.end for span in segments), default=0)
        while self._asked and self._asked[0] <= latest:
            self._asked.popleft()
        for is_sampled in sampled.values():
            self.figures["sampled" if is_sampled else "root_only"] += 1
        decisions = {span.span_id: sampled[_segment_of(span)] for span in segments}
        for span in ended:
            if span.segment is None:
                is_selected = selects(span.trace.trace_id)
                decisions[span.span_id] = self.of_trace_group(
                    span.name, span.longest, failed=span.span_id in failed, selected=is_selected
                )
        return decisions

    def of_trace_group(self, name: str, duration_ns: int, *, failed: bool, selected: bool = True) -> bool:
        """Decides whether a trace group that is no segment is sampled. ``selected``: whether its trace is."""
        slow = self._keeps_all or self._slow.takes(name, duration_ns)
        is_sampled = failed or (selected and slow)
        self.figures["sampled" if is_sampled else "root_only"] += 1
        return is_sampled


def _segment_of(span: StepSpan) -> tuple[int, tuple[int, int] | None]:
    """A key of a segment, equal for all its spans: the number of a step; for other segments, the link to the one before."""
    return span.number, span.link if span.number < 0 else None
