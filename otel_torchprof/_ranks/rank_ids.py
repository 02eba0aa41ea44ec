"""Ids that every rank of a run can compute for every other: of traces, of the spans of steps, and of collectives.

All of them are keyed hashes of what the ranks agreed on once, so that a link from one rank to another needs no message. They
are spread evenly over all their bits: a sampler that goes by the trace id takes the share that it is to take.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

TOGETHER, APART = "together", "apart"
"""A trace per step and rank, or one per step for all ranks."""

MOST_LINKED = 16
"""Ranks of a group up to which a collective links to each of the others."""


class Run(NamedTuple):
    """What the ids of a run are made from; all ranks have the same."""

    run_id: str
    restart: int = 0
    attempt: str = ""
    """Tells apart what has the same id and number: a run id that is used again, processes that a launcher began anew."""


class StepIds(NamedTuple):
    """The span of a step on one rank."""

    trace_id: int
    span_id: int
    parent_span_id: int = 0
    """Of the same trace, on another rank; 0 for a root."""
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids of the same step elsewhere."""


def _blake2b(text: str, **options: Any) -> bytes:
    import hashlib  # here: with OpenSSL it takes as long as this whole folder, and torch has imported it where there are ranks

    return hashlib.blake2b(text.encode(), **options).digest()


@functools.cache
def run_key(run: Run) -> bytes:
    """The key of all ids of a run."""
    text = "\0".join((run.run_id, str(run.restart), run.attempt))
    return _blake2b(text, digest_size=32, person=b"otel_torchprof")


def step_trace_id(run: Run, step: int, rank: int | None) -> int:
    """The trace of a step on a rank; with None the one that all ranks share."""
    return _hash(run, 16, "trace", step, "" if rank is None else rank)


def step_span_id(run: Run, step: int, rank: int) -> int:
    """The span of a step on a rank."""
    return _hash(run, 8, "step", step, rank)


def collective_span_id(run: Run, rank: int, group: str, sequence: int, operation: str = "") -> int:
    """The span of a rank's part in a collective: the ``sequence``-th of its group."""
    return _hash(run, 8, "collective", rank, group, sequence, operation)


def step_ids(run: Run, step: int, rank: int, *, layout: str, first: int) -> StepIds:
    """The ids of a step on a rank; ``first`` is the first rank that exports: what others hang under, or link to."""
    span_id = step_span_id(run, step, rank)
    if layout == TOGETHER:
        parent = 0 if rank == first else step_span_id(run, step, first)
        return StepIds(step_trace_id(run, step, None), span_id, parent)
    elsewhere = () if rank == first else ((step_trace_id(run, step, first), step_span_id(run, step, first)),)
    return StepIds(step_trace_id(run, step, rank), span_id, 0, elsewhere)


def linked_peers(ranks: Sequence[int], rank: int, most: int = MOST_LINKED) -> tuple[int, ...]:
    """To which other ranks of its group a rank's part in a collective links, at most ``most``.

    To all in a group of up to :data:`MOST_LINKED`; in a larger one to the first and to its neighbours: by these every other can
    be reached, and the number of links does not grow with the square of the ranks.
    """
    if rank not in ranks:
        return ()
    others = [other for other in ranks if other != rank]
    if len(ranks) > MOST_LINKED:
        at = list(ranks).index(rank)
        near = dict.fromkeys((ranks[0], ranks[at - 1], ranks[(at + 1) % len(ranks)]))
        others = [other for other in near if other != rank]
    return tuple(others[: max(most, 0)])


def _hash(run: Run, size: int, *parts: object) -> int:
    """Never 0, which is no valid id. The parts cannot run into each other: only the last but one or two are free text."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(_blake2b(text, digest_size=size, key=run_key(run)), "big") or 1
