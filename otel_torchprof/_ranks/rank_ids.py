"""Ids of traces, step spans and collectives that every rank of a run can compute for every other rank.

All ids are keyed hashes, with a key that the ranks agree on once, so a link from one rank to another needs no message. They are
uniformly distributed, as samplers by trace id require.
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
    """Seed of the ids of a run, the same on all ranks."""

    run_id: str
    restart: int = 0
    attempt: str = ""
    """Distinguishes attempts with the same run id and restart: a reused run id, or processes restarted by a launcher."""


class StepIds(NamedTuple):
    """The span of a step on one rank."""

    trace_id: int
    span_id: int
    parent_span_id: int = 0
    """Span of the same trace on another rank; 0 for a root."""
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids of the same step on other ranks."""


def _blake2b(text: str, **options: Any) -> bytes:
    import hashlib  # here: with OpenSSL it takes as long as this whole folder, and torch has imported it where there are ranks

    return hashlib.blake2b(text.encode(), **options).digest()


@functools.cache
def run_key(run: Run) -> bytes:
    """The key of all ids of a run."""
    text = "\0".join((run.run_id, str(run.restart), run.attempt))
    return _blake2b(text, digest_size=32, person=b"otel_torchprof")


def step_trace_id(run: Run, step: int, rank: int | None) -> int:
    """Id of the trace of a step on a rank; with None, of the trace that all ranks share."""
    return _hash(run, 16, "trace", step, "" if rank is None else rank)


def step_span_id(run: Run, step: int, rank: int) -> int:
    """Id of the span of a step on a rank."""
    return _hash(run, 8, "step", step, rank)


def collective_span_id(run: Run, rank: int, group: str, sequence: int, operation: str = "") -> int:
    """Id of the span of a rank in a collective, the ``sequence``-th of its group."""
    return _hash(run, 8, "collective", rank, group, sequence, operation)


def step_ids(run: Run, step: int, rank: int, *, layout: str, first: int) -> StepIds:
    """The ids of a step on a rank; ``first``: the first rank that exports, to which the others link or whose children they are."""
    span_id = step_span_id(run, step, rank)
    if layout == TOGETHER:
        parent = 0 if rank == first else step_span_id(run, step, first)
        return StepIds(step_trace_id(run, step, None), span_id, parent)
    elsewhere = () if rank == first else ((step_trace_id(run, step, first), step_span_id(run, step, first)),)
    return StepIds(step_trace_id(run, step, rank), span_id, 0, elsewhere)


def linked_peers(ranks: Sequence[int], rank: int, most: int = MOST_LINKED) -> tuple[int, ...]:
    """The ranks to which a rank's span in a collective links, at most ``most``.

    All others in a group of up to :data:`MOST_LINKED`; in a larger group, the first rank and the neighbours, by which all others can
    be reached without a quadratic number of links.
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
    """A hash of the parts, never 0, which is no valid id. Joined parts are unambiguous: only one near the end is free text."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(_blake2b(text, digest_size=size, key=run_key(run)), "big") or 1
