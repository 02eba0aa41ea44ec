"""Which ranks of a run export: all, the first of each node, one, or a share."""

from __future__ import annotations

import functools
from typing import NamedTuple

Choice = str | float
"""One of ``all``, ``node`` and ``one``, or a share of the ranks, above 0 and below 1."""


class Place(NamedTuple):
    """Where a process stands among those of its run; None where that is not known."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Exporting(NamedTuple):
    """Who exports."""

    own: bool
    """Whether this rank does."""
    total: int
    """How many do."""
    first: int
    """The lowest of them."""


def exporting(choice: Choice, place: Place, seed: str = "") -> Exporting:
    """Who exports, as every rank finds it for itself.

    Where it is not known which process is the first of its node, every one exports. ``seed`` varies which ranks are sampled
    from run to run; it has to be the same on all of them.
    """
    rank, world = place.rank, place.world_size
    if choice == "one":
        return Exporting(rank == 0, 1, 0)
    if choice == "node" and place.local_rank is not None:
        nodes = -(-world // place.local_world_size) if place.local_world_size else world
        return Exporting(place.local_rank == 0, nodes, 0)
    if isinstance(choice, float):
        chosen = _sampled(choice, world, seed)
        return Exporting(rank in chosen, len(chosen), min(chosen))
    return Exporting(True, world, 0)


@functools.lru_cache(maxsize=8)
def _sampled(share: float, world: int, seed: str) -> frozenset[int]:
    """So many ranks as the share says, at least one: those whose hashes are the lowest."""
    import hashlib  # as in rank_ids

    def order(rank: int) -> bytes:
        return hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=8).digest()

    return frozenset(sorted(range(world), key=order)[: max(1, round(share * world))])
