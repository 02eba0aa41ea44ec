"""Adds the adapters of Hugging Face and Lightning to new trainers while torch is instrumented."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._process import process_changes
from otel_torchprof._process.wrapped_calls import WrappedCalls

from .actions import Actions
from .loop import trainer_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper

_logger = logging.getLogger("otel_torchprof")


class _Constructor(NamedTuple):
    """The constructor of a framework's trainer."""

    module: str
    """Module with the class."""
    path: str
    mark: Callable[[Any], None]
    """Adds the adapter to a trainer."""
    unmark: Callable[[Any], None]
    """Removes the adapter; no effect if it was not added."""


def _mark_huggingface(trainer: Any) -> None:
    from .huggingface import AutomaticCallback

    trainer.add_callback(AutomaticCallback(trainer.callback_handler))


def _unmark_huggingface(trainer: Any) -> None:
    from .huggingface import AutomaticCallback

    trainer.remove_callback(AutomaticCallback)


def _mark_lightning(trainer: Any) -> None:
    profiler = trainer.profiler
    if not hasattr(profiler, "_torchprof_actions"):  # else it is ours, or another trainer has it too
        profiler._torchprof_actions = Actions()  # noqa: SLF001 - our own
        profiler.start = functools.partial(_start, profiler)
        profiler.stop = functools.partial(_stop, profiler)


def _unmark_lightning(trainer: Any) -> None:
    own = vars(trainer.profiler)
    if getattr(own.get("start"), "func", None) is _start:
        for name in ("start", "stop", "_torchprof_actions"):
            own.pop(name, None)


def _start(profiler: Any, action_name: str) -> None:
    profiler._torchprof_actions.start(action_name, profiler)  # noqa: SLF001 - our own
    type(profiler).start(profiler, action_name)


def _stop(profiler: Any, action_name: str) -> None:
    type(profiler).stop(profiler, action_name)
    profiler._torchprof_actions.stop(action_name, profiler)  # noqa: SLF001 - our own


_CONSTRUCTORS = (
    _Constructor("transformers.trainer", "Trainer.__init__", _mark_huggingface, _unmark_huggingface),
    _Constructor("lightning.pytorch.trainer.trainer", "Trainer.__init__", _mark_lightning, _unmark_lightning),
    _Constructor("pytorch_lightning.trainer.trainer", "Trainer.__init__", _mark_lightning, _unmark_lightning),
)


class Frameworks:
    """Adds adapters to new trainers while there is a user. Install and remove are thread-safe.

    Costs an import one dictionary lookup, and a trainer some microseconds when it is made. Trainers are distinguished
    by identity: a subclass may have its own comparison.
    """

    def __init__(self) -> None:
        self._calls = WrappedCalls(_CONSTRUCTORS, self._marking)
        self._marked: dict[int, tuple[weakref.ref[Any], _Constructor]] = {}

    def install(self, user: object) -> None:
        """Adds adapters to new trainers from now on, and to trainers that had one before."""
        is_first = not self._calls.has_users
        self._calls.install(user)
        trainer_calls.install(user)
        if is_first:
            self._change_all(lambda constructor: constructor.mark)

    def remove(self, user: object) -> None:
        """Removes all adapters with the last user; no effect for an unknown user."""
        had_users = self._calls.has_users
        self._calls.remove(user)
        trainer_calls.remove(user)
        if had_users and not self._calls.has_users:
            self._change_all(lambda constructor: constructor.unmark)

    def _change_all(self, change: Callable[[_Constructor], Callable[[Any], None]]) -> None:
        for reference, constructor in list(self._marked.values()):
            trainer = reference()
            if trainer is not None:
                self._tried(change(constructor), trainer)

    def after_fork_in_child(self) -> None:
        """Renews the lock: a child that continues to record has the trainers of its parent."""
        self._calls.renew_lock()

    def _marking(self, constructor: _Constructor, function: Callable[..., Any]) -> Wrapper:
        marks = True

        @functools.wraps(function)
        def construct(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            function(trainer, *arguments, **keywords)
            key = id(trainer)
            if marks and key not in self._marked:
                self._marked[key] = weakref.ref(trainer, lambda _: self._marked.pop(key, None)), constructor
                self._tried(constructor.mark, trainer)

        def retire() -> None:
            nonlocal marks
            marks = False

        return construct, retire

    def _tried(self, change: Callable[[Any], None], trainer: Any) -> None:
        """Applies a change; errors are logged, since the program's trainer works without the adapter."""
        try:
            change(trainer)
        except Exception:
            _logger.warning("%s of %s failed: its steps are learned", change.__name__, type(trainer), exc_info=True)


shared = Frameworks()
"""Instance of the process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=shared.after_fork_in_child)
