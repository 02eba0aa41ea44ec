"""The process groups that a rank is in, as torch.distributed knows them."""

from __future__ import annotations

import itertools
from typing import Any

_MOST_GROUPS = 32
"""Groups that a resource names."""
_LONGEST = 200
"""Characters of the list of a group's ranks."""
_NO_NAME = {"", "undefined", "default_pg"}


class Groups:
    """Looked up in torch's own books, which are small dictionaries; cheap to ask again. Thread-safe.

    Args:
        c10d: ``torch.distributed.distributed_c10d``; None: there are none.
        rank: this process's.
    """

    def __init__(self, c10d: Any = None, rank: int = -1) -> None:
        self._c10d = c10d
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._texts: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()

    def texts(self) -> tuple[str, ...]:
        """Each group but that of the whole world, once: ``name:ranks``, such as ``mesh_tp:0-3``, at most 32."""
        self._read()
        return self._texts

    def _read(self) -> None:
        """Takes up groups that are new; those that the program has destroyed are remembered: their work may be drained later."""
        if self._c10d is None:
            return
        try:
            world = self._c10d._world  # noqa: SLF001 - nothing public names the groups
            names = dict(world.pg_names)
            if tuple(names.values()) == self._names:
                return
            every = self._c10d.get_world_size() if self._c10d.is_initialized() else 0
            texts, is_whole = list(self._texts), True
            for group, name in names.items():
                ranks = tuple(world.pg_group_ranks.get(group, ()))
                is_whole = is_whole and bool(ranks)  # torch enters a group into one book after the other
                if name not in self._ranks and self._rank in ranks:
                    self._ranks[name] = ranks
                    if len(ranks) != every:
                        texts.append(f"{_displayed(group, name)}:{ranges(ranks)}")
            self._texts = tuple(texts[:_MOST_GROUPS])
            self._names = tuple(names.values()) if is_whole else ()
        except (
            AttributeError,
            RuntimeError,
            ValueError,
        ):  # another thread makes groups, or this torch keeps other books
            self._names = ()


def _displayed(group: Any, name: str) -> str:
    """What the program calls it, such as the dimension of a device mesh; else torch's own name of it."""
    description = str(getattr(group, "group_desc", ""))
    return name if description in _NO_NAME else description


def ranges(ranks: tuple[int, ...]) -> str:
    """``0-3,8``; of evenly spaced ones ``0-12/4``: from 0 to 12, every fourth. Cut where it gets too long."""
    steps = {following - one for one, following in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:  # noqa: PLR2004 - two are written out
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    text = ",".join(parts)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
