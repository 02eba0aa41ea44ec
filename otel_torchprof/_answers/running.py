"""What a running process does now, from its black box: steps, phases and operators of the last seconds, and what is open.

A look reads only what is new in the box, so that its cost depends on the events since the last look and not on the size of the box. The
process has no part in it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof._columns.phases import PHASES, UNATTRIBUTED, Segment
from otel_torchprof._columns.schema import NEVER, Flag, Kind
from otel_torchprof._files.rank_state import RunKey, rank_of, run_of
from otel_torchprof._model.phase_tokens import PhaseTokens
from otel_torchprof._model.phases import exclusive_times
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._process.threads import NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from otel_torchprof._columns.batch import Batch
    from otel_torchprof._native.blackbox import Collective, Contents

SECOND = 10**9
WINDOW_NS = 10 * SECOND
"""Shares and rates are those of so much time before a look."""
FIRST_LOOKS_NS = WINDOW_NS, 10 * WINDOW_NS, 100 * WINDOW_NS
"""How far back the first look reads, until it finds the rate of steps of a process that trains."""
LAG_NS = SECOND // 20
"""What ended less than this before a look is left to the next one: a thread may not have written it yet."""
_SLACK_NS = SECOND // 10
_MOST_STEPS = 10_000
_FEW_STEPS = 3
_OPERATORS = 20
"""Operators that are remembered of a look."""
_LATE = 0.1
"""A rank is late if it is in collectives by this share of the time less than the others, who wait for it there."""
_COLLECTIVE = PHASES.index("collective")


class OpenCall(NamedTuple):
    """An event that has not ended."""

    name: str
    kind: Kind
    since_ns: int
    """Unix ns."""


class OpenThread(NamedTuple):
    """The open events of a thread, the root first."""

    os_tid: int
    name: str
    calls: Sequence[OpenCall]


class SelfTime(NamedTuple):
    """Self time of an operator or label in the last seconds."""

    name: str
    share: float
    """Self time on all threads, as a share of the time."""


class ProcessView(NamedTuple):
    """What one process did in the last seconds, and does now."""

    pid: int
    rank: int | None
    run: RunKey
    program: str
    host: str
    step: int | None
    """Number of the running step; None if there is none."""
    is_numbered: bool
    """Whether this is the number that the process itself counts; otherwise steps are counted from the first look on."""
    step_rate: float | None
    """Steps per second."""
    shares: Mapping[str, float]
    """Share of the time by phase, on the thread of the loop, with the rest as ``unattributed``; empty without phases."""
    operators: Sequence[SelfTime]
    """The slowest first; empty if the box has no operators."""
    threads: Sequence[OpenThread]
    """Threads with open events; that of the loop first."""
    looked_ns: int
    """Time of the look, Unix ns."""
    host_bytes: int | None = None
    """Resident memory; None if it cannot be seen from here."""
    is_late: bool = False
    """Whether the other ranks of its run wait for it."""
    collectives: float | None = None
    """Share of the time in which a collective was in flight, or the loop waited for other ranks; None if there were none so far."""
    device_bytes: int | None = None
    """Memory of tensors on devices; None if the process does not report any."""
    rates: Mapping[str, float] | None = None
    """``tokens``, ``samples`` and ``flops`` per second, and ``mfu``, as far as the process reports them: of steps, or generated tokens."""
    line: str = ""
    """Line of the program that the main thread is in; empty if it is not known."""
    step_seconds: float | None = None
    """Median duration of the steps of the last seconds, or of the last three if there were fewer."""


class _Slice(NamedTuple):
    """What happened between two looks."""

    begin: int
    end: int
    phases: npt.NDArray[np.int64]
    """ns on the thread of the loop, by phase."""
    operators: Mapping[str, int]
    """Self time, ns."""
    collectives: int
    """ns in collectives."""


class StepCounter:
    """Counts steps and tells their rate. Times are Unix ns."""

    def __init__(self) -> None:
        self._begins: deque[int] = deque(maxlen=_MOST_STEPS)
        self._first: int | None = None
        """Begin of the first step, which may have begun before: its length is not known."""
        self._count = 0
        self._numbered: int | None = None

    def add(self, begins: Sequence[int]) -> None:
        """Adds the begins of steps, in order."""
        self._first = next(iter(begins), None) if self._first is None else self._first
        self._begins.extend(begins)
        self._count += len(begins)

    def number(self, step: int, end: int) -> None:
        """Takes the number of a step that has ended from the process itself."""
        later = sum(1 for begin in self._begins if begin >= end)
        self._numbered = step - self._count + later

    @property
    def is_numbered(self) -> bool:
        """Whether :attr:`step` is the number that the process counts."""
        return self._numbered is not None

    @property
    def step(self) -> int | None:
        """Number of the running step; None before the first."""
        if self._numbered is not None:
            return self._count + self._numbered
        return self._count or None

    def rate(self, now: int) -> float | None:
        """Steps per second in the last seconds, or of the last three steps if there were fewer; falls while a step takes longer."""
        begins = self._recent(now)
        if len(begins) < 2 or begins[0] <= begins[-1]:  # noqa: PLR2004 - two times are one step
            return None
        steps, elapsed = len(begins) - 1, begins[0] - begins[-1]
        overdue = max(
            now - begins[0] - 2 * elapsed // steps - LAG_NS, 0
        )  # a begin is known when its first pass has ended
        return steps * SECOND / (elapsed + overdue)

    def seconds(self, now: int) -> float | None:
        """Median duration of the same steps."""
        begins = self._recent(now)
        durations = [later - earlier for later, earlier in pairwise(begins)]
        return statistics.median(durations) / SECOND if durations else None

    def _recent(self, now: int) -> list[int]:
        """Begins of steps, the latest first: of the thousands most are older."""
        begins: list[int] = []
        for begin in reversed(self._begins):
            if begin == self._first or (begin < now - WINDOW_NS and len(begins) >= _FEW_STEPS):
                break
            begins.append(begin)
        return begins


class RunningProcess:
    """The state of a process, from one look at its box to the next. Not thread-safe.

    The first look may get earlier events than :attr:`reads_from`: steps are learned from all.

    Args:
        since: how far back shares and operators go at the first look, Unix ns.
    """

    def __init__(self, since: int) -> None:
        self.mark = since
        """Time up to which everything is known, Unix ns."""
        self.steps = StepCounter()
        self._tokens = PhaseTokens()
        self._cycle = StepCycle()
        self._loop: int | None = None
        self._slices: deque[_Slice] = deque()
        self._phase_times = np.zeros(len(PHASES), np.int64)
        self._operator_times: Counter[str] = Counter()
        """Times in all slices, ns; those of operators are above 0."""
        self._is_first = True

    @property
    def reads_from(self) -> int:
        """From when on the next look needs the events, Unix ns."""
        return self.mark - _SLACK_NS

    @property
    def has_trained(self) -> bool:
        """Whether a backward pass was seen."""
        return self._cycle.has_trained

    def look(self, contents: Contents, now: int) -> ProcessView:
        """Takes what the box has since :attr:`reads_from`; costs some ms at 10,000 events."""
        batch, is_open = _with_open_ends(contents, 0 if self._is_first else self.mark)
        until = max(now - LAG_NS, self.mark)
        self._count_steps(batch, until)
        self._add(self._slice(contents, batch, until))
        self.mark, self._is_first = until, False
        threads = _open_threads(batch, is_open, self._loop, contents.pid)
        info = contents.info
        return ProcessView(
            contents.pid,
            rank_of(contents),
            run_of(info),
            str(info.get("program") or ""),
            str(info.get("host") or ""),
            self.steps.step,
            self.steps.is_numbered,
            self.steps.rate(now),
            self._shares(),
            self._operators(),
            threads,
            now,
            collectives=sum(each.collectives for each in self._slices) / self._time if contents.groups else None,
            step_seconds=self.steps.seconds(now),
        )

    def _count_steps(self, batch: Batch, until: int) -> None:
        begin = (
            0 if self._is_first else self.mark
        )  # the first chunks may have more than what was asked for: good for learning
        tokens = [token for token in self._tokens.take(batch) if begin <= token.end < until]
        boundaries = self._cycle.feed(tokens, until)
        self.steps.add([each.time for each in boundaries if each.segment is Segment.STEP])
        if boundaries:
            self._loop = boundaries[-1].thread

    def _add(self, latest: _Slice) -> None:
        self._slices.append(latest)
        self._phase_times += latest.phases
        self._operator_times.update(latest.operators)
        while len(self._slices) > 1 and self._slices[0].end < latest.end - WINDOW_NS:
            oldest = self._slices.popleft()
            self._phase_times -= oldest.phases
            for name, time in oldest.operators.items():
                self._operator_times[name] -= time
                if self._operator_times[name] <= 0:
                    del self._operator_times[name]

    def _slice(self, contents: Contents, batch: Batch, until: int) -> _Slice:
        begin = min(max(self.mark, contents.complete_since_ns), until)  # a full box has given up what was before
        start, end = (np.minimum(np.maximum(batch[name], begin), until) for name in ("start", "end"))
        clipped = replace(batch, columns={**batch.columns, "start": start, "end": end})
        nothing = np.zeros(len(PHASES), np.int64)
        found = exclusive_times(clipped, batch["parent"], np.zeros(len(batch), np.int64), 1)
        phases = nothing
        if found is not None:
            times = found.times[0, :, : len(PHASES)]
            if self._loop not in found.threads:
                busiest = found.threads[int(times.sum(axis=1).argmax())]
                self._loop = busiest if self._loop is None else self._loop
            phases = times[found.threads.index(self._loop)] if self._loop in found.threads else nothing
        waited = int(phases[_COLLECTIVE])
        in_flight = _time_in(contents.collectives, begin, until)
        return _Slice(begin, until, phases, _operator_times(batch, end - start), max(waited, in_flight))

    @property
    def _time(self) -> int:
        return max(sum(each.end - each.begin for each in self._slices), 1)

    def _shares(self) -> dict[str, float]:
        whole, times = self._time, self._phase_times.tolist()
        if not any(times):
            return {}
        shares = {name: time / whole for name, time in zip(PHASES, times, strict=True) if time > 0}
        return {**shares, UNATTRIBUTED: max(1 - sum(shares.values()), 0.0)}

    def _operators(self) -> list[SelfTime]:
        time = self._time
        return [SelfTime(name, own / time) for name, own in self._operator_times.most_common(_OPERATORS)]


def _with_open_ends(contents: Contents, since: int = 0) -> tuple[Batch, npt.NDArray[np.bool_]]:
    """The events of a box: those that are open with no end and unmarked, with a mask of these; those that ended before ``since`` of no kind."""
    batch = contents.batch
    is_open = ((batch["flags"] & int(Flag.UNFINISHED)) != 0) & (batch["end"] >= contents.last_ns)
    end = np.where(is_open, NEVER, batch["end"])
    flags = np.where(is_open, batch["flags"] & ~np.uint8(Flag.UNFINISHED), batch["flags"])
    kind = np.where(end < since, 0, batch["kind"])  # none of them is around one that ended later
    return replace(batch, columns={**batch.columns, "end": end, "flags": flags, "kind": kind}), is_open


def _operator_times(batch: Batch, durations: npt.NDArray[np.int64]) -> dict[str, int]:
    """Self times of operators and labels, the largest only."""
    kind = batch["kind"]
    rows = np.flatnonzero(((kind == int(Kind.OPERATOR)) | (kind == int(Kind.LABEL))) & (durations > 0))
    if not rows.size:
        return {}
    parents = batch["parent"]
    inner = np.flatnonzero((parents >= 0) & (durations > 0))
    inside = np.bincount(parents[inner], durations[inner], len(durations))
    times = np.bincount(batch["name"][rows], durations[rows] - inside[rows])
    names = np.flatnonzero(times > 0)
    largest = names[np.argsort(-times[names])[:_OPERATORS]]
    return {batch.names[name]: int(times[name]) for name in largest.tolist()}


def open_threads(contents: Contents, loop: int | None = None) -> list[OpenThread]:
    """The threads of a box with open events but those of this package: that of the loop first, by its ident, then the main thread."""
    return _open_threads(*_with_open_ends(contents), loop, contents.pid)


def _open_threads(batch: Batch, is_open: npt.NDArray[np.bool_], loop: int | None, pid: int) -> list[OpenThread]:
    calls: dict[int, list[OpenCall]] = defaultdict(list)
    for row in np.flatnonzero(is_open).tolist():
        name, kind = batch.names[batch["name"][row]], Kind(batch["kind"][row])
        calls[int(batch["thread"][row])].append(OpenCall(name, kind, int(batch["start"][row])))
    threads = [(batch.threads[at], each) for at, each in calls.items() if not batch.threads[at].name.startswith(NAME)]
    threads.sort(key=lambda item: (item[0].ident != loop, item[0].os_tid != pid, -len(item[1])))
    return [
        OpenThread(thread.os_tid, "main" if thread.os_tid == pid else thread.name, each) for thread, each in threads
    ]


def _time_in(collectives: Sequence[Collective], begin: int, end: int) -> int:
    """Time between two times, ns, in which a collective was in flight, as far as its backend reports that."""
    total, known = 0, begin
    for call in sorted((call for call in collectives if call.is_tracked), key=lambda call: call.enqueued_ns):
        last = min(call.completed_ns or end, end)
        total += max(last - max(call.enqueued_ns, known), 0)
        known = max(known, last)
    return total


def jobs(views: Iterable[ProcessView]) -> Iterator[list[ProcessView]]:
    """Processes of one run and program together; several of one rank are of as many jobs, which nothing but their pids tells apart."""

    def run(view: ProcessView) -> tuple[str, RunKey]:
        return view.program, view.run

    for _, group in groupby(sorted(views, key=lambda view: (run(view), view.pid)), run):
        found: dict[int, list[ProcessView]] = defaultdict(list)
        count: Counter[int] = Counter()
        for view in group:
            found[0 if view.rank is None else count[view.rank]].append(view)
            if view.rank is not None:
                count[view.rank] += 1
        yield from found.values()


def with_late_ranks(views: Sequence[ProcessView]) -> list[ProcessView]:
    """Marks in each job the rank for which the others wait: it is the least in collectives, and clearly less than they are."""
    late = set()
    for job in jobs(views):
        ranks = [(view.collectives, view.pid) for view in job if view.rank is not None and view.collectives is not None]
        (least, pid), *others = sorted(ranks) or [(0.0, 0)]
        if others and statistics.median(share for share, _ in others) - least >= _LATE:
            late.add(pid)
    return [view._replace(is_late=view.pid in late) for view in views]
