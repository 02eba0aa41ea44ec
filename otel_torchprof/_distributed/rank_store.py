"""How ranks agree on something by the store of their process group, without waiting for each other.

Everything is one operation of the store: what it holds under a key, or, where it holds nothing, what is offered.
"""

from __future__ import annotations

import os
from typing import Any

from .rank_ids import Run

_KEY = "otel_torchprof/run"
_MOST_GENERATIONS = 1000
"""Processes of one rank that have started and ended, as far as they are looked through."""

_own_words: dict[int, str] = {}
"""By the id of a process, a word that is its own: a forked child has another."""


def made_id(store: Any) -> str:
    """A new run id, or the one that was made before the launcher began the processes anew, if its store has lived on."""
    while hasattr(store, "underlying_store"):  # around it are prefixes, which may be those of one attempt
        store = store.underlying_store
    return _held(store, f"{_KEY}/id", os.urandom(16).hex())


def agreed(store: Any, offered: Run, rank: int, *, session: int, restart: int | None) -> Run:
    """What the first rank has offered, with the attempt that it has made up.

    A store may outlive the processes, and still hold what those before have agreed on. That is noticed by a slot of each
    rank, which is taken then: the rank continues to the next. ``restart`` keeps ranks together of which one had not got as far
    as to take its slot the last time; None where the store is new each time.

    Raises:
        Exception: whatever the store does.
        ValueError: it holds something else.
    """
    key = f"{_KEY}/{session}" if restart is None else f"{_KEY}/{session}/{restart}"
    own = _own_word()
    for generation in range(_MOST_GENERATIONS):
        if _held(store, f"{key}/{generation}/{rank}", own) == own:
            text = "\n".join((offered.run_id, str(offered.restart), os.urandom(8).hex()))
            run_id, restarts, attempt = _held(store, f"{key}/{generation}", text).split("\n")
            return Run(run_id, int(restarts), attempt)
    raise ValueError(f"the store holds {_MOST_GENERATIONS} earlier processes of rank {rank}")


def _held(store: Any, key: str, offered: str) -> str:
    held: bytes = store.compare_set(key, "", offered)
    return held.decode()


def _own_word() -> str:
    """The same whenever this process asks; a forked child has another."""
    return _own_words.setdefault(os.getpid(), os.urandom(8).hex())
