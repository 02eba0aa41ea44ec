"""Writes reports: of a profile, of trace files, and of what differs between two of them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torchprof._answers.diff import diff
from otel_torchprof._answers.rank_reading import read_ranks
from otel_torchprof._answers.requests import request_series
from otel_torchprof._encode.page import page
from otel_torchprof._export import file
from otel_torchprof._files.reading import read_events
from otel_torchprof.errors import TorchProfError

from .loaded import checked_limit, load_watched
from .report import ExplainedSteps, RecordingSums, report_of, report_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._answers.difference import Difference
    from otel_torchprof._export.byte_stream import ByteStream

    Watch = Callable[[str, ByteStream], None]


def write_report(paths: Sequence[str], output: str, names: Sequence[str], watch: Watch) -> list[str]:
    """Writes the report of the files of one recording; returns messages about parts that could not be read.

    Args:
        paths: trace files: of a recording, or one for each rank.
        output: path of the page.
        names: the names of the files in the page.
        watch: gets each open file, to display how much has been read.

    Raises:
        TorchProfError: a file cannot be read, or the page cannot be written.
    """
    recording, steps = _read(paths, names, watch)
    file.write(output, [page(report_of(recording, steps))])
    of_steps = [] if steps.explanation is None else steps.explanation.problems
    return list(dict.fromkeys((*recording.problems, *of_steps)))


def write_diff_report(before: str, after: str, output: str, watch: Watch) -> Difference:
    """Writes the report of what differs between two files; returns the difference.

    Raises:
        TorchProfError: as of :func:`~otel_torchprof.diff`; or the page cannot be written.
    """
    difference = diff(before, after, watch)
    (first, steps), (second, others) = (_read([path], [path], watch) for path in (before, after))
    file.write(output, [page(report_of_two(first, second, (steps, others), difference))])
    return difference


def _read(paths: Sequence[str], names: Sequence[str], watch: Watch) -> tuple[RecordingSums, ExplainedSteps]:
    """The sums and the steps of files, each of which is read for both at the same time."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    shown = {path: Path(name).name for path, name in zip(paths, names, strict=True)}
    recording = RecordingSums(f"{shown[paths[0]]}{more}", shown)
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(ExplainedSteps.of, partial(read_ranks, paths))
        for path in paths:
            prof = load_watched(path, checked_limit(None), partial(watch, path))
            notes = [note if path in note else f"{path!r}: {note}" for note in prof.health.notes]
            recording.add(prof._summed(), notes, shown[path] if more else "")  # noqa: SLF001 - no method for users
            recording.problems += notes if prof.is_partial else ()
        found = steps.result()
    if not found.ranks:  # a service, perhaps: its requests are known from one more reading only
        with contextlib.suppress(TorchProfError):
            recording.requests = request_series(read_events(paths))
    return recording, found
