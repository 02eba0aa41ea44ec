"""Worker processes of a DataLoader, which are not to be taken for processes that train."""

from __future__ import annotations

import sys
from multiprocessing import current_process


def is_loader_worker() -> bool:
    """Whether this process is a worker of a DataLoader, of torch or torchdata: known before anything of it runs but its start.

    One that is started anew (``spawn``) imports the program before it knows what it is for. A microsecond.
    """
    return _is_for_a_loader(current_process())


def starts_loader_worker() -> bool:
    """Whether the fork in whose handlers this is called makes such a worker: in the parent."""
    frame = sys._getframe()  # noqa: SLF001 - the only way to the callers, and documented
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "start" and frame.f_globals.get("__name__") == "multiprocessing.process":
            return _is_for_a_loader(frame.f_locals.get("self"))
    return False


def _is_for_a_loader(process: object) -> bool:
    target = getattr(process, "_target", None)
    package = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") == "_worker_loop" and package.partition(".")[0] in {"torch", "torchdata"}
