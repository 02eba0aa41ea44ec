"""The trace files of several ranks as one: a Chrome trace of all on one clock. Each file is read twice, and never in memory whole."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._encode.chrome_json import BASE_GRID_NS, compact
from otel_torchprof._encode.table import format_time
from otel_torchprof._export.file import check_writable, write
from otel_torchprof.errors import TorchProfError

from .alignment import FEWEST_COMMON, align
from .merged_events import MergedEvents, Target, process_lines
from .merged_spans import MergedSpans
from .rank_files import FIRST_OTHER_PID, FileOutline, read_rank_files
from .reading import MERGED_RANKS, process_of
from .records import RecordReading, check_given_once

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from otel_torchprof._export.byte_stream import ByteStream

    from .alignment import Clock, Unaligned
    from .rank_files import RankFiles

_PIECE = 1 << 20
_CLOSING = b"\n]}\n"
_WAY_OUT = (
    "record all ranks with this package's instrumentation, stream or run, detail ops, at the same time; collectives of "
    "devices are not seen to end, so call dist.barrier() of a gloo group now and then; Kineto's traces do not number collectives"
)


class Merged(NamedTuple):
    """What was merged."""

    ranks: tuple[str, ...]
    """One line about the clock of each."""
    problems: tuple[str, ...]
    """What could not be read."""


def merge(
    paths: Sequence[str],
    out: str,
    watch: Callable[[str, ByteStream], None] = lambda _path, _stream: None,
) -> Merged:
    """Writes the merged trace to ``out``, compressed where the name ends in ``.gz``; whole or not at all.

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
    reference = next((place for place, each in enumerate(ranks) if each.rank == 0), _place_of_first(ranks, outlines))
    found, unaligned = align([each.collectives for each in ranks], reference)
    if unaligned:
        raise TorchProfError(_refusal(ranks, unaligned))
    clocks = [found[place] for place in range(len(ranks))]
    base = _base(ranks[reference])
    named: set[Hashable] = set()
    targets = [
        Target(place, each.pid, each.name, clock, base, named)
        for place, (each, clock) in enumerate(zip(ranks, clocks, strict=True))
    ]
    problems: list[str] = []
    head = _head(ranks, targets, reference)
    write(out, itertools.chain([head], _pieces(outlines, ranks, targets, watch, problems), [_CLOSING]))
    lines = (_line(ranks, clocks, place, reference) for place in range(len(ranks)) if place != reference)
    return Merged(tuple(lines), tuple(problems))


def _check(paths: Sequence[str], out: str) -> None:
    check_writable(out)
    check_given_once(paths)
    if os.path.realpath(out) in map(os.path.realpath, paths):
        raise TorchProfError(f"-o {out!r} is one of the files to merge: give it another name")


def _place_of_first(ranks: list[RankFiles], outlines: list[FileOutline]) -> int:
    return next(place for place, each in enumerate(ranks) if each.parts[0][0] is outlines[0])


def _base(reference: RankFiles) -> int:
    """The start of a week, at least one before its first collective: viewers drop negative times, and a double tells nanoseconds apart."""
    return max(0, (int(reference.collectives.start.min()) // BASE_GRID_NS - 1) * BASE_GRID_NS)


# ---- what is said of clocks ----


def _refusal(ranks: list[RankFiles], unaligned: dict[int, Unaligned]) -> str:
    """Names ranks and files, counts, and the way out."""
    reasons = []
    for place, each in itertools.islice(unaligned.items(), 3):
        own, by = ranks[place], ranks[each.by]
        files = ", ".join(repr(outline.path) for outline, _ in own.parts)
        if each.fit is None:
            count = f"{each.most} collective{'' if each.most == 1 else 's'}"
            why = f"{count} whose end is known in common with {by.name}, and {FEWEST_COMMON} are needed"
        elif each.fit.steep:
            faster = f"{abs(each.fit.steep) * 1e6:,.0f} ppm {'faster' if each.fit.steep > 0 else 'slower'}"
            why = (
                f"its times run {faster} than those of {by.name}, which no two clocks do: one of the files was changed"
            )
        else:
            error, duration = format_time(each.fit.error / 1000), format_time(each.fit.duration / 1000)
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
        f"{ranks[place].name}: clock {format_time(abs(clock.offset) / 1000)} {relation} that of {name}{drift}; aligned to "
        f"{format_time(clock.error / 1000)}, largest {format_time(clock.largest / 1000)}, by {clock.collectives:,} collectives{through}"
    )


def _head(ranks: list[RankFiles], targets: list[Target], reference: int) -> bytes:
    """The document up to its events: with the errors of the clocks, and the processes of the ranks."""
    info = [_info(each, target, ranks) for each, target in zip(ranks, targets, strict=True)]
    fields = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": targets[reference].base,
        "otherData": {"reference": ranks[reference].name, MERGED_RANKS: info},
    }
    processes = itertools.chain.from_iterable(
        process_lines(target, each.service) for each, target in zip(ranks, targets, strict=True)
    )
    return (f'{compact(fields)[:-1]},\n"traceEvents":[\n' + ",\n".join(processes)).encode()


def _info(rank: RankFiles, target: Target, ranks: list[RankFiles]) -> dict[str, Any]:
    clock = target.clock
    found: dict[str, Any] = {"pid": target.pid, "name": rank.name}
    if rank.rank is not None:
        found["rank"] = rank.rank
    found["files"] = [Path(outline.path).name for outline, _ in rank.parts]
    if clock.by is not None:
        found |= {
            "clock_offset_ns": clock.offset,
            "clock_drift_ppm": clock.drift * 1e6,
            "alignment_error_ns": round(clock.error),
            "alignment_largest_error_ns": round(clock.largest),
            "aligned_with": ranks[clock.by].name,
            "collectives": clock.collectives,
        }
    return found


# ---- the second reading ----


def _pieces(
    outlines: list[FileOutline],
    ranks: list[RankFiles],
    targets: list[Target],
    watch: Callable[[str, ByteStream], None],
    problems: list[str],
) -> Iterator[bytes]:
    """The events of all files, file by file."""
    free, spans = itertools.count(FIRST_OTHER_PID), MergedSpans(len(ranks))
    for outline in outlines:
        of_file = {
            key: target
            for each, target in zip(ranks, targets, strict=True)
            for part, key in each.parts
            if part is outline
        }
        records = _MergedRecords(outline, of_file, spans, free)
        reading = RecordReading(outline.path, records, partial(watch, outline.path))
        for _ in reading:
            if records.size >= _PIECE:
                yield records.taken()
        problems += reading.problems
        records.settle()
        yield records.taken()


class _MergedRecords:
    """Takes the records of a file again, and writes them as events of the merged trace.

    Args:
        outline: what is known of the file.
        targets: the ranks in it, by process.
        spans: writes those of OTLP.
        free: process ids for what is no rank.
    """

    def __init__(
        self, outline: FileOutline, targets: dict[Hashable, Target], spans: MergedSpans, free: Iterator[int]
    ) -> None:
        self._path, self._targets, self._spans = outline.path, targets, spans
        self._events: MergedEvents | None = None
        if outline.is_chrome:
            self._events = MergedEvents(targets[None], outline.base, outline.main, outline.names, free)
        self._of_resource: Target | None = None
        self._lines: list[str] = []
        self._count = self.size = 0

    def __len__(self) -> int:
        return self._count

    def add_member(self, name: str, value: Any) -> None:
        """Raises as in the first reading; else without effect: what is to be known of the file is."""
        FileOutline(self._path).add_member(name, value)

    def add_event(self, event: dict[str, Any]) -> None:
        """Writes an event."""
        if self._events is not None:
            self._extend(self._events.lines(event))
            self._count += 1

    def begin_resource(self, attributes: dict[str, Any]) -> None:
        """The rank of the spans that follow."""
        self._of_resource = self._targets.get(process_of(attributes))

    def add_span(self, span: Any, scope: str) -> None:
        """Writes a span, maybe with those after it."""
        if self._of_resource is not None:
            self._extend(self._spans.lines(span, scope, self._of_resource))
            self._count += 1

    def settle(self) -> None:
        """The file has been read."""
        self._extend(self._spans.rest())

    def taken(self) -> bytes:
        """What has been written since the last time."""
        found = "".join(self._lines).encode()
        self._lines, self.size = [], 0
        return found

    def _extend(self, lines: Iterator[str]) -> None:
        for line in lines:
            self._lines.append(line)
            self.size += len(line)
