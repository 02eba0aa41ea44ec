"""The event sources that use Python's C API, for the other folders; documented in ``_python.pyi``."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from otel_torchprof._process import process_changes, threads

from .ffi import Label, python_sources

if TYPE_CHECKING:
    from .recorder import Session

__all__ = [
    "Label",
    "errors",
    "follow_calls",
    "follow_compiler",
    "follow_modules",
    "follow_phases",
    "foresee",
    "foreseen",
    "forget_foresight",
    "generate_begin",
    "generate_end",
    "generation",
    "in_graph",
    "in_phase",
    "leave_modules",
    "optimizer_begin",
    "optimizer_end",
    "phase_begin",
    "phase_collection",
    "phase_end",
    "set_context_resolver",
    "show_errors",
    "show_labels",
    "traced",
    "usage_at",
    "usage_now",
]

errors = python_sources.errors
follow_calls = python_sources.follow_calls
follow_compiler = python_sources.follow_compiler
follow_modules = python_sources.follow_modules
follow_phases = python_sources.follow_phases
foresee = python_sources.foresee
foreseen = python_sources.foreseen
forget_foresight = python_sources.forget_foresight
generate_begin = python_sources.generate_begin
generate_end = python_sources.generate_end
generation = python_sources.generation
in_graph = python_sources.in_graph
in_phase = python_sources.in_phase
leave_modules = python_sources.leave_modules
select_foreseen = python_sources.select_foreseen
optimizer_begin = python_sources.optimizer_begin
optimizer_end = python_sources.optimizer_end
phase_begin = python_sources.phase_begin
phase_collection = python_sources.phase_collection
phase_end = python_sources.phase_end
set_context_resolver = python_sources.set_context_resolver
show_errors = python_sources.show_errors
show_labels = python_sources.show_labels
traced = python_sources.traced
usage_at = python_sources.usage_at
usage_now = python_sources.usage_now


_EVERY_SESSION = (1 << 32) - 1
_lock = threads.RLock()  # a garbage collection, hence any finalizer, may start while it is held


class GcPauses:
    """Records garbage collections on all threads as events of a session, from :meth:`start` to :meth:`stop`.

    Finalizers that a collection runs are inside its event. A collection that is running at the start is left out; one that
    is running at the stop ends there, and the callback for its end stays in ``gc.callbacks`` until the next recording has stopped.
    Costs a microsecond per collection.
    """

    def __init__(self, session: Session) -> None:
        self._consumer = session.consumer

    def start(self) -> None:
        """Starts it; the session must be running. Call :meth:`stop` even if this is interrupted."""
        with _lock:
            python_sources.follow_collections(self._consumer)
            if python_sources.on_collection not in gc.callbacks:
                gc.callbacks.append(python_sources.on_collection)

    def stop(self) -> None:
        """Stops it. Thread-safe."""
        _leave(self._consumer)


def _leave(consumers: int) -> None:
    with _lock:
        if not python_sources.leave_collections(consumers):
            with contextlib.suppress(ValueError):  # other code has cleared the list
                gc.callbacks.remove(python_sources.on_collection)


def off() -> None:
    """Stops it for all sessions: in forked children, and at interpreter exit."""
    _leave(_EVERY_SESSION)


def no_pauses_in_child() -> None:
    """Stops it in a forked child."""
    global _lock  # noqa: PLW0603 - a thread of the parent may have held it
    _lock = threads.RLock()
    off()


process_changes.at_exit(process_changes.Order.SOURCES, off)


_Class = TypeVar("_Class")
_OWN = frozenset({"__dict__", "__module__", "__weakref__"})
"""Attributes that every class defines for itself."""


def untracked(cls: type[_Class]) -> type[_Class]:
    """Excludes the objects of a dataclass from garbage collection, so that creating many of them triggers no collection.

    At most 24 fields; no base class, no subclass, no ``super()``. Objects in a reference cycle are never freed. An object costs
    as much as one with ``__slots__``.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    untracked_class: type[_Class] = python_sources.untracked((f"{cls.__module__}.{cls.__qualname__}", *names))
    for name, value in vars(cls).items():
        if name not in _OWN and name not in names:
            setattr(untracked_class, name, value)
    return untracked_class
