"""Worker processes of a DataLoader, which are not to be taken for processes that train."""

from __future__ import annotations

from multiprocessing import current_process


def is_loader_worker() -> bool:
    """Whether this process is a worker of a DataLoader, of torch or torchdata: known before anything of it runs but its start.

    One that is started anew (``spawn``) imports the program before it knows what it is for. A microsecond.
    """
    target = getattr(current_process(), "_target", None)
    package = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") == "_worker_loop" and package.partition(".")[0] in {"torch", "torchdata"}
