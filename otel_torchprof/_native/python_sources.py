"""The sources of events that need Python's API, as other folders use them; ``_python.pyi`` has what each does."""

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
    "number_foreseen",
    "optimizer_begin",
    "optimizer_end",
    "phase_begin",
    "phase_collection",
    "phase_end",
    "set_context_resolver",
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
number_foreseen = python_sources.number_foreseen
optimizer_begin = python_sources.optimizer_begin
optimizer_end = python_sources.optimizer_end
phase_begin = python_sources.phase_begin
phase_collection = python_sources.phase_collection
phase_end = python_sources.phase_end
set_context_resolver = python_sources.set_context_resolver
show_labels = python_sources.show_labels
traced = python_sources.traced
usage_at = python_sources.usage_at
usage_now = python_sources.usage_now


_EVERY_SESSION = (1 << 32) - 1
_lock = threads.RLock()  # a collection, hence any finalizer, may begin wherever it is held


class GcPauses:
    """Collections as events of a session, on whatever thread they happen, from :meth:`start` to :meth:`stop`.

    Each is an event where it happens, in which the finalizers are that it runs. One that runs already is left out; one that
    still runs at the stop ends there. Costs a microsecond per collection. A function that waits for the end of such a one
    stays among ``gc.callbacks`` until the next recording has stopped.
    """

    def __init__(self, session: Session) -> None:
        self._consumer = session.consumer

    def start(self) -> None:
        """Begins it, once the session runs. To be stopped also where this is interrupted."""
        with _lock:
            python_sources.follow_collections(self._consumer)
            if python_sources.on_collection not in gc.callbacks:
                gc.callbacks.append(python_sources.on_collection)

    def stop(self) -> None:
        """Ends it, from any thread."""
        _leave(self._consumer)


def _leave(consumers: int) -> None:
    with _lock:
        if not python_sources.leave_collections(consumers):
            with contextlib.suppress(ValueError):  # somebody has emptied the list
                gc.callbacks.remove(python_sources.on_collection)


def off() -> None:
    """Off, whoever began it: in forked children, and before the interpreter is taken down."""
    _leave(_EVERY_SESSION)


def no_pauses_in_child() -> None:
    """In a forked child: off, as it is in a process that has not begun it."""
    global _lock  # noqa: PLW0603 - whoever held it is not in this process
    _lock = threads.RLock()
    off()


process_changes.at_exit(process_changes.Order.SOURCES, off)


_Class = TypeVar("_Class")
_OWN = frozenset({"__dict__", "__module__", "__weakref__"})
"""What each class has of its own."""


def untracked(cls: type[_Class]) -> type[_Class]:
    """Makes a dataclass one for objects that are made per step or per event: a thousand bring no collection nearer.

    At most 24 fields; no base class, no subclass, no ``super()``. Those in a cycle of references are never freed. An object costs
    what one of a class with ``__slots__`` costs.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    found: type[_Class] = python_sources.untracked((f"{cls.__module__}.{cls.__qualname__}", *names))
    for name, value in vars(cls).items():
        if name not in _OWN and name not in names:
            setattr(found, name, value)
    return found
