"""Callbacks at forks and at exit, registered when the package is imported, in this order.

Exit functions of a program, for which a flush may wait, run before this package's only if they were registered later;
and this package's depend on their order. So all modules that register any are imported here, and no others, which are
imported on first access to their names.
"""

from __future__ import annotations

import importlib
import logging  # noqa: F401 - before ours, which may log: it has a lock to release in a child, and shuts down after them
import os
from typing import Any

from otel_torchprof._process import threads

# isort: off
from otel_torchprof._native import record_function_fast  # noqa: F401 - for what it registers, as all of them
from otel_torchprof._process import fork
from otel_torchprof._encode import process_resource  # noqa: F401
from otel_torchprof._process import after_import  # noqa: F401
from otel_torchprof._metrics import gpu_metrics  # noqa: F401
from otel_torchprof._process import cleanup  # noqa: F401
from otel_torchprof._sources import torch_hooks  # noqa: F401
from otel_torchprof._sources import module_calls  # noqa: F401
from otel_torchprof._sources import compile_events  # noqa: F401
from otel_torchprof._sources import phases  # noqa: F401
from otel_torchprof._sources import device_source  # noqa: F401
from otel_torchprof._sources import contexts  # noqa: F401
from otel_torchprof._sources import function_labels  # noqa: F401
from . import sigterm  # noqa: F401
from otel_torchprof._native import frames, gc_pauses

_importing = threads.RLock()
_forking = threads.local()
"""On a thread that forks. ``has_lock``: whether it took the lock above."""


def imported(module: str) -> Any:
    """Imports a module on access to one of its names; a fork waits for it.

    Python does not release the lock of a module that another thread was importing at the fork: a child that imports it
    waits forever.
    """
    with _importing:
        return importlib.import_module(module)


def _before_fork() -> None:
    _forking.has_lock = False  # the wait may be interrupted
    _forking.has_lock = _importing.acquire(timeout=fork.LONGEST_WAIT)
    fork.call("before")


def _after_fork_in_parent() -> None:
    fork.call("after_in_parent")
    if _forking.has_lock:
        _importing.release()


def _after_fork_in_child() -> None:
    global _importing  # noqa: PLW0603 - another thread of the parent may have held it
    _importing = threads.RLock()
    fork.call("after_in_child")


# First: what is the parent's is off when the child's is started.
frames.at_process_changes()
gc_pauses.at_process_changes()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

from otel_torchprof._process import profiler_flag  # noqa: E402, F401
from otel_torchprof._profile import steps  # noqa: E402, F401
from otel_torchprof._sources import ranges  # noqa: E402, F401
