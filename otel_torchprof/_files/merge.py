"""Merges trace files of several ranks into one Chrome trace on one clock. Reads each file twice, as a stream."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._encode.chrome_json import BASE_GRID_NS, compact
from otel_torchprof._encode.table import brief_time
from otel_torchprof._export.file import check_is_no_input, check_writable, write
from otel_torchprof._native.trace_files import TraceRewriter
from otel_torchprof.errors import TorchProfError

from . import attribute_keys
from .alignment import FEWEST_COMMON, align
from .attribute_keys import MERGED_RANKS, OTHER
from .collectives import WORKS, CollectiveList, Collectives, host_of_kernels
from .merged_events import MergedEvents, MergeTarget, Processes
from .merged_spans import MergedSpans, SpanReading
from .reading import EventReading
from .records import BASE_TIME, MalformedError, check_can_be_read_twice, check_given_once
from .trace_events import TraceEventKind, step_number
from .values import LARGEST_NUMBER, key_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

    from .alignment import Clock, Unaligned
    from .trace_events import TraceEvents


# ---- The first reading of the files: their ranks, and the collectives of each rank ----

MOST_RANKS = 1024
"""Most ranks: viewers display no more, and it limits the memory per rank."""
FIRST_OTHER_PID = 1_000_000
"""First process id of processes that are no ranks, such as devices."""
_MOST_KEPT = 2_000_000
"""Most collectives of all ranks together, at 32 bytes each."""
_MOST_COLLECTIVES = 400_000
"""Most collectives of a file while it is read, including the work of backends."""
_MOST_NAMES = 100
"""Most names of other processes in a file, such as devices."""
_LONGEST_NAME = 200


@dataclass
class MergedProcess:
    """A process that may be a rank, as found by the first reading."""

    rank: int | None = None
    instance: Any = None
    service: str = ""
    calls: CollectiveList = field(default_factory=CollectiveList)


class FileOutline:
    """What merging needs of a file before its events are written: its ranks, their collectives, and metadata.

    Raises:
        TorchProfError: it cannot be read, or was merged already.
    """

    def __init__(self, path: str, watch: Callable[[ByteStream], None] = lambda _stream: None) -> None:
        self.path = path
        reading = EventReading(path, watch)
        events = reading.events
        self.problems = events.problems
        """Messages about unreadable parts."""
        self.is_chrome = reading.is_chrome
        self.base = 0
        """Time base of a Chrome trace, Unix ns."""
        self.main: Hashable = None
        """The process of a Chrome trace that is the rank."""
        self.names: dict[Hashable, str] = {}
        """Names of the processes of a Chrome trace."""
        self.processes: dict[Hashable, MergedProcess] = {}
        """The ranks by process; the process of a Chrome trace is None."""
        for process, attributes in reading.resources.items():
            service = attributes.get(attribute_keys.SERVICE)
            found = self._process(process)
            found.rank, found.instance = events.ranks.get(process), key_of(attributes.get(attribute_keys.INSTANCE))
            found.service = service[:_LONGEST_NAME] if isinstance(service, str) else ""
        self._add_collectives(events)
        if self.is_chrome:
            self._settle_chrome(reading, events)

    def _process(self, key: Hashable) -> MergedProcess:
        if key not in self.processes and len(self.processes) == MOST_RANKS:
            raise TorchProfError(f"more than {MOST_RANKS:,} processes in one file: merge those that matter")
        return self.processes.setdefault(key, MergedProcess())

    def _add_collectives(self, events: TraceEvents) -> None:
        """Adds collectives, the work of backends, steps with collectives that have no spans, and steps of torch."""
        is_work = events.named(lambda name: name.startswith(WORKS)) & (events.kind != TraceEventKind.WORK)
        is_call, is_torch, is_step = (
            events.has(key)
            for key in (attribute_keys.COLLECTIVE, attribute_keys.TORCH_NAME, attribute_keys.COLLECTIVES)
        )
        is_torch_step = events.steps() & (events.kind != TraceEventKind.SPAN)
        rows = np.flatnonzero(is_work | is_call | is_torch | is_step | is_torch_step)[:_MOST_COLLECTIVES]
        host = host_of_kernels(events)
        for row, attributes in zip(rows.tolist(), events.attributes_of(rows), strict=True):
            is_kernel = events.kind.item(row) == TraceEventKind.WORK
            calls = self._process(host if is_kernel else events.tracks[events.track.item(row)][0]).calls
            start, duration, name = (
                events.start.item(row),
                events.duration.item(row),
                events.names[events.name.item(row)],
            )
            calls.add_step(start, attributes)
            if is_call[row]:
                calls.add_call(start, duration, attributes)
            elif is_torch[row]:
                calls.add_torch_call(start, duration, attributes, is_kernel=is_kernel)
            elif is_torch_step[row]:
                calls.add_torch_step(step_number(name) or 0, start, duration)
            elif is_work[row]:
                calls.add_work(name, start, duration)

    def _settle_chrome(self, reading: EventReading, events: TraceEvents) -> None:
        """Makes one rank of the file, and names its processes. Raises TorchProfError for a merged trace."""
        for name, value in reading.members.items():
            check_is_not_merged(self.path, value)
            if name == BASE_TIME:
                with contextlib.suppress(MalformedError):  # it is among the problems
                    self.base = whole(value, name)
        labels = self._add_names(reading.process_names)
        pids = [pid for pid, process in self.processes.items() if process.calls.count]
        if len(pids) > 1:
            raise TorchProfError(
                f"{self.path!r} has collectives of {len(pids)} processes: it was merged already; give the files of its ranks"
            )
        self.main = pids[0] if pids else next(iter(self.names), None)
        service = self.names.get(self.main, "")
        self.names |= {pid: label for pid, label in labels.items() if pid != self.main}
        resources = [value.get("resource") for value in reading.members.values() if isinstance(value, dict)]
        instances = [key_of(each.get(attribute_keys.INSTANCE)) for each in resources if isinstance(each, dict)]
        merged_process = MergedProcess(events.ranks.get(None), instances[-1] if instances else None, service)
        if pids:
            merged_process.calls = self.processes[pids[0]].calls
        self.processes = {None: merged_process}

    def _add_names(self, process_names: Sequence[tuple[Hashable, str, str]]) -> dict[Hashable, str]:
        """Adds the names of processes, and returns their labels."""
        labels: dict[Hashable, str] = {}
        for pid, kind, text in process_names:
            if len(self.names) < _MOST_NAMES:
                known = self.names if kind == "process_name" else labels
                known.setdefault(pid, text[:_LONGEST_NAME])
        return labels


def check_is_not_merged(path: str, value: Any) -> None:
    """Raises TorchProfError if a member of a Chrome trace says that it was merged."""
    if isinstance(value, dict) and MERGED_RANKS in value:
        raise TorchProfError(f"{path!r} was merged already: give the files of its ranks")


@dataclass
class RankFiles:
    """A rank, and the files that contain it."""

    rank: int | None
    name: str
    """``rank 3``, or the name of its file."""
    service: str
    instance: Any
    parts: list[tuple[FileOutline, Hashable]]
    """Files, and the key of its process in each."""
    collectives: Collectives
    pid: int = 0
    """Its process id in the merged trace."""


def read_rank_files(
    paths: Sequence[str], watch: Callable[[str, ByteStream], None]
) -> tuple[list[FileOutline], list[RankFiles]]:
    """Reads the files for the first time; returns them, and their ranks in order.

    Raises:
        TorchProfError: a file cannot be read, two files are of the same rank, or there are too many ranks.
    """
    outlines, ranks = [], list[RankFiles]()
    for path in paths:
        check_can_be_read_twice(path)
        outline = FileOutline(path, partial(watch, path))
        outlines.append(outline)
        for key, process in outline.processes.items():
            _add(ranks, outline, key, process, _MOST_KEPT // max(len(paths), 1))
        outline.processes = {}
    _number(ranks)
    return outlines, sorted(ranks, key=lambda rank: rank.pid)


def _add(ranks: list[RankFiles], outline: FileOutline, key: Hashable, process: MergedProcess, most: int) -> None:
    """Adds a process to the ranks, as a new rank or as the continuation of one."""
    rank = process.calls.rank if process.rank is None else process.rank
    collectives = _thinned(_on_unix_clock(process.calls.settled(), outline.base), most)
    twin = next((other for other in ranks if rank is not None and other.rank == rank), None)
    if twin is None:
        if len(ranks) == MOST_RANKS:
            raise TorchProfError(f"there are more than {MOST_RANKS:,} ranks: merge those that matter")
        name = Path(outline.path).name if rank is None else f"rank {rank}"
        ranks.append(RankFiles(rank, name, process.service, process.instance, [(outline, key)], collectives))
        return
    other = twin.parts[-1][0].path
    if process.instance is None or process.instance != twin.instance:
        raise TorchProfError(f"{other!r} and {outline.path!r} are both of rank {rank}: give files of one run")
    if np.isin(collectives.key, twin.collectives.key).any():
        raise TorchProfError(
            f"{other!r} and {outline.path!r} hold the same collectives of rank {rank}: give one of them"
        )
    twin.parts.append((outline, key))
    columns = (np.concatenate(pair) for pair in zip(twin.collectives, collectives, strict=True))
    twin.collectives = _thinned(Collectives(*columns), most)


def _on_unix_clock(collectives: Collectives, base: int) -> Collectives:
    """Collectives with Unix times, from times relative to ``base``; without impossible times."""
    moved = collectives._replace(start=collectives.start + base, end=collectives.end + base)
    return moved.chosen(np.abs(moved.start) <= LARGEST_NUMBER)


def _thinned(collectives: Collectives, most: int) -> Collectives:
    """At most ``most`` collectives, the same ones on every rank: those with the smallest hashes."""
    if len(collectives.key) <= most:
        return collectives
    mixed = (collectives.key ^ (collectives.key >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return collectives.chosen(np.sort(np.argpartition(mixed, most)[:most]))


def _number(ranks: list[RankFiles]) -> None:
    """Sets the process ids: the rank, if it is known and small enough for viewers."""
    taken = {rank.rank for rank in ranks}
    free = (number for number in range(2 * MOST_RANKS) if number not in taken)
    for rank in ranks:
        is_small = rank.rank is not None and rank.rank < FIRST_OTHER_PID
        rank.pid = rank.rank if is_small and rank.rank is not None else next(free)


_CLOSING = b"\n]}\n"
_WAY_OUT = (
    "record all ranks with this package's instrumentation, stream or run, detail ops, at the same time; collectives of "
    "devices are not seen to end, so call dist.barrier() of a gloo group now and then; or record the same steps of all ranks "
    "with torch.profiler, whose calls of gloo do not name their group: only jobs in which each group has all ranks can be aligned"
)


class MergeResult(NamedTuple):
    """Result of a merge."""

    ranks: tuple[str, ...]
    """One line about the clock of each rank."""
    problems: tuple[str, ...]
    """Messages about unreadable parts."""


def merge(
    paths: Sequence[str],
    out: str,
    watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None,
) -> MergeResult:
    """Writes the merged trace to ``out``, compressed if the name ends in ``.gz``; an error leaves no partial file.

    Args:
        paths: the files of the ranks.
        out: the file to write.
        watch: gets the name and the stream of each file when it is opened, twice.

    Raises:
        TorchProfError: a file cannot be read or written, or ranks cannot be aligned.
    """
    _check(paths, out)
    outlines, ranks = read_rank_files(paths, watch)
    if len(ranks) == 1:
        raise TorchProfError(
            f"{', '.join(map(repr, paths))} {'is' if len(paths) == 1 else 'are'} of one rank: there is nothing to merge; give the files of several ranks"
        )
    reference = next((place for place, rank in enumerate(ranks) if rank.rank == 0), _place_of_first(ranks, outlines))
    clock_by_place, unaligned = align([rank.collectives for rank in ranks], reference)
    if unaligned:
        raise TorchProfError(_refusal(ranks, unaligned))
    clocks = [clock_by_place[place] for place in range(len(ranks))]
    base = _base(ranks[reference])
    targets = [
        MergeTarget(place, rank.pid, rank.name, clock, base)
        for place, (rank, clock) in enumerate(zip(ranks, clocks, strict=True))
    ]
    problems: list[str] = []
    head = _head(ranks, targets, reference)
    write(out, itertools.chain([head], _pieces(outlines, ranks, targets, watch, problems), [_CLOSING]))
    lines = (_line(ranks, clocks, place, reference) for place in range(len(ranks)) if place != reference)
    return MergeResult(tuple(lines), tuple(problems))


def _check(paths: Sequence[str], out: str) -> None:
    check_writable(out)
    check_given_once(paths)
    check_is_no_input(out, paths)


def _place_of_first(ranks: list[RankFiles], outlines: list[FileOutline]) -> int:
    return next(place for place, rank in enumerate(ranks) if rank.parts[0][0] is outlines[0])


def _base(reference: RankFiles) -> int:
    """Time base of the merged trace, Unix ns: the start of a week, at least a week before the reference's first collective.

    Viewers drop negative times, and times since then are exact to the nanosecond in a double.
    """
    return max(0, (int(reference.collectives.start.min()) // BASE_GRID_NS - 1) * BASE_GRID_NS)


# ---- messages about clocks ----


def _refusal(ranks: list[RankFiles], unaligned: dict[int, Unaligned]) -> str:
    """The error for ranks that cannot be aligned: ranks, files, counts, and what to do."""
    reasons = []
    for place, failure in itertools.islice(unaligned.items(), 3):
        own, by = ranks[place], ranks[failure.by]
        files = ", ".join(repr(outline.path) for outline, _ in own.parts)
        if failure.fit is None:
            count = f"{failure.most} collective{'' if failure.most == 1 else 's'}"
            why = f"{count} whose end is known in common with {by.name}, and {FEWEST_COMMON} are needed"
        elif failure.fit.is_ambiguous:
            offset, period = (brief_time(time / 1000) for time in (abs(failure.fit.line.offset), failure.fit.period))
            why = (
                f"its clock would differ from that of {by.name} by {offset}, more than half of the {period} from one step "
                "or collective to the next: only their order numbers the collectives, and they may be those of another step"
            )
        elif failure.fit.steep:
            faster = f"{abs(failure.fit.steep) * 1e6:,.0f} ppm {'faster' if failure.fit.steep > 0 else 'slower'}"
            why = (
                f"its times run {faster} than those of {by.name}, which no two clocks do: one of the files was changed"
            )
        else:
            error, duration = brief_time(failure.fit.error / 1000), brief_time(failure.fit.duration / 1000)
            why = f"its clock differs from that of {by.name} by {error} from one collective to another, and these last {duration}"
        reasons.append(f"{own.name} ({files}): {why}")
    more = f"; and {len(unaligned) - 3} more ranks" if len(unaligned) > len(reasons) else ""
    problems = [problem for rank in ranks for outline, _ in rank.parts for problem in outline.problems]
    return "; ".join((*problems[:3], f"clocks cannot be aligned: {'; '.join(reasons)}{more}", _WAY_OUT))


def _line(ranks: list[RankFiles], clocks: list[Clock], place: int, reference: int) -> str:
    clock, name = clocks[place], ranks[reference].name
    relation = "ahead of" if clock.offset >= 0 else "behind"
    drift = f", drift {clock.drift * 1e6:+.3f} ppm" if clock.drift else ""
    through = "" if clock.by is None or clock.by == reference else f" with {ranks[clock.by].name}"
    return (
        f"{ranks[place].name}: clock {brief_time(abs(clock.offset) / 1000)} {relation} that of {name}{drift}; aligned to "
        f"{brief_time(clock.error / 1000)}, largest {brief_time(clock.largest / 1000)}, by {clock.collectives:,} collectives{through}"
    )


def _head(ranks: list[RankFiles], targets: list[MergeTarget], reference: int) -> bytes:
    """The document up to its events, with the errors of the clocks and the processes of the ranks."""
    info = [_info(rank, target, ranks) for rank, target in zip(ranks, targets, strict=True)]
    fields = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": targets[reference].base,
        OTHER: {"reference": ranks[reference].name, MERGED_RANKS: info},
    }
    processes = itertools.chain.from_iterable(
        target.name_lines(rank.service) for rank, target in zip(ranks, targets, strict=True)
    )
    return (f'{compact(fields)[:-1]},\n"traceEvents":[\n' + ",\n".join(processes)).encode()


def _info(rank: RankFiles, target: MergeTarget, ranks: list[RankFiles]) -> dict[str, Any]:
    clock = target.clock
    info: dict[str, Any] = {"pid": target.pid, "name": rank.name}
    if rank.rank is not None:
        info["rank"] = rank.rank
    info["files"] = [Path(outline.path).name for outline, _ in rank.parts]
    if clock.by is not None:
        info |= {
            "clock_offset_ns": clock.offset,
            "clock_drift_ppm": clock.drift * 1e6,
            "alignment_error_ns": round(clock.error),
            "alignment_largest_error_ns": round(clock.largest),
            "aligned_with": ranks[clock.by].name,
            "collectives": clock.collectives,
        }
    return info


# ---- The second reading ----


def _pieces(
    outlines: list[FileOutline],
    ranks: list[RankFiles],
    targets: list[MergeTarget],
    watch: Callable[[str, ByteStream], None],
    problems: list[str],
) -> Iterator[bytes]:
    """Yields the events of all files, file by file."""
    free, rewriter, spans = itertools.count(FIRST_OTHER_PID), TraceRewriter(), MergedSpans(len(ranks))
    events: MergedEvents | SpanReading
    for outline in outlines:
        of_file = {
            key: target
            for rank, target in zip(ranks, targets, strict=True)
            for part, key in rank.parts
            if part is outline
        }
        if outline.is_chrome:
            target = of_file[None]
            processes = Processes(target, outline.main, outline.names, free)
            events = MergedEvents(outline.path, outline.base, target, processes, rewriter)
        else:
            events = SpanReading(outline.path, of_file, spans)
        yield from events.pieces(partial(watch, outline.path))
        problems += events.problems
