"""Calls of trainers from their first step to the last: what an adapter has begun in one ends with it, also where an exception leaves it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._process import fork
from otel_torchprof._process.wrapped_calls import WrappedCalls

from .loop import ending_loops

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper


class _TrainerCall(NamedTuple):
    """A method of a framework's trainer."""

    module: str
    """Where it is looked up."""
    path: str


_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_CALLS = (
    _TrainerCall("transformers.trainer", "Trainer.train"),
    *(_TrainerCall(module, "Trainer.fit") for module in _LIGHTNING),
)


def _ending(_call: _TrainerCall, function: Callable[..., Any]) -> Wrapper:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        with ending_loops():
            return function(*arguments, **keywords)

    return wrapper, _nothing


def _nothing() -> None:
    """A call that is still wrapped ends what it has begun, and no more."""


shared = WrappedCalls(_CALLS, _ending)
"""Those of the process."""
fork.call_late(after_in_child=shared.renew_lock)
