"""File names with what tells processes apart: ``{pid}`` and ``{rank}``."""

from __future__ import annotations

import os

from otel_torchprof._distributed.ranks import place_in

PID = "{pid}"
RANK = "{rank}"


def own_path(template: str) -> str:
    """The path for this process: ``{pid}`` is its id, ``{rank}`` its rank as the launcher says, 0 where none does."""
    path = template.replace(PID, str(os.getpid()))
    if RANK in path:
        place = place_in(os.environ)
        path = path.replace(RANK, str(0 if place is None else place.rank))
    return path
