"""Calls of trainers: loops that an adapter begins in a call end with it, also after an exception."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import Segment
from otel_torchprof._process import process_changes
from otel_torchprof._process.wrapped_calls import WrappedCalls

from .loop import Loop, ending_loops

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper


class _TrainerCall(NamedTuple):
    """A method of a framework's trainer."""

    module: str
    """Module with the class."""
    path: str
    segment: Segment | None = None
    """Segment of the whole call, if it is called directly and the framework does not report its begin."""


_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_CALLS = (
    _TrainerCall("transformers.trainer", "Trainer.train"),
    _TrainerCall("transformers.trainer", "Trainer.evaluate", Segment.EVALUATION),
    *(_TrainerCall(module, f"Trainer.{name}") for module in _LIGHTNING for name in ("fit", "validate", "test")),
)


def _ending(call: _TrainerCall, function: Callable[..., Any]) -> Wrapper:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        with ending_loops() as is_top_level:
            if call.segment is not None and is_top_level:
                Loop().change(call.segment, is_evaluation=True)
            return function(*arguments, **keywords)

    return wrapper, _stay_active


def _stay_active() -> None:
    """Does nothing: a call that is still wrapped only ends its loops."""


shared = WrappedCalls(_CALLS, _ending)
"""Wrapped calls of the process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=shared.renew_lock)
