"""Functions of torch and transformers that are phases: wrapped in the modules that look them up, while phases are recorded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import Part
from otel_torchprof._native import python_sources
from otel_torchprof._process.wrapped_calls import WrappedCalls

from . import generations
from .compiled_code import leave_uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._process.wrapped_calls import Wrapper


class _Call(NamedTuple):
    """A function that is a phase."""

    module: str
    """The module in which the function is looked up."""
    path: str
    """The function's name in the module; a method's includes the class."""
    part: Part
    object_of: Callable[[tuple[Any, ...]], Any] | None = None
    """Returns the phase's object from the positional arguments."""
    is_given: bool = False
    """The phase is not this method, but the function that is its first argument, whenever it runs."""
    is_bare: bool = False
    """The wrapper is not a Python function: for functions that dynamo does not read. They find the line for their warnings by
    counting Python functions."""


def _first(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments else None


def _dataset(arguments: tuple[Any, ...]) -> Any:
    """Dataset of a loader's iterator: the same object in every epoch, unlike the iterator."""
    return getattr(arguments[0], "_dataset", None)


_CALLS = (
    _Call("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", Part.NEXT, _dataset, is_bare=True),
    # Called by Tensor.backward and torch.autograd.grad, which must not be wrapped: that would split compiled graphs.
    _Call("torch.autograd", "_engine_run_backward", Part.BACKWARD, is_bare=True),
    _Call("torch.autograd.graph", "_engine_run_backward", Part.BACKWARD, is_bare=True),
    # Recomputation of non-reentrant checkpoints, then of reentrant ones, which run a backward pass in their backward.
    _Call("torch.utils.checkpoint", "_CheckpointFrame.__init__", Part.RECOMPUTATION, is_given=True),
    _Call("torch.utils.checkpoint", "CheckpointFunction.backward", Part.RECOMPUTATION),
    _Call("torch.optim.optimizer", "Optimizer.zero_grad", Part.ZEROING, _first),
    _Call("torch.amp.grad_scaler", "GradScaler.step", Part.SCALER_STEP, _first),
    _Call("torch.amp.grad_scaler", "GradScaler.update", Part.SCALER_UPDATE, _first),
    _Call("torch.amp.grad_scaler", "GradScaler.unscale_", Part.UNSCALE, _first),
    # Not clip_grad_norm_, which programs import by name; it calls these two.
    _Call("torch.nn.utils.clip_grad", "_get_total_norm", Part.CLIPPING),
    _Call("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", Part.CLIPPING),
    _Call("torch.optim.swa_utils", "AveragedModel.update_parameters", Part.AVERAGING),
    _Call("torch.serialization", "_save", Part.SAVE),
    _Call("torch.serialization", "_legacy_save", Part.SAVE),
    _Call("torch.serialization", "_open_zipfile_writer_file.__exit__", Part.SAVE),
    _Call("torch.serialization", "_open_zipfile_writer_buffer.__exit__", Part.SAVE),
    _Call("safetensors.torch", "serialize_file", Part.SAVE),
    _Call("torch.distributed.distributed_c10d", "Work.wait", Part.COLLECTIVE),
    _Call("torch.cuda", "synchronize", Part.DEVICE_WAIT),
    _Call("torch.accelerator", "synchronize", Part.DEVICE_WAIT),
    _Call("transformers.generation.utils", "GenerationMixin.generate", Part.GENERATE),
)


def _wrapper(call: _Call, function: Callable[..., Any]) -> Wrapper:
    if call.part is Part.GENERATE:
        return _generating(function)
    if call.is_bare:
        return _bare(function, call)
    return _giving(function, call) if call.is_given else _phase(function, call)


def _phase(function: Callable[..., Any], call: _Call) -> Wrapper:
    """``function`` as a phase, and what makes it no phase again."""
    begin, end, is_none = python_sources.phase_begin, python_sources.phase_end, python_sources.in_graph
    part, object_of = int(call.part), call.object_of

    @functools.wraps(function)
    def in_phase(*arguments: Any, **keywords: Any) -> Any:
        if is_none():
            return function(*arguments, **keywords)
        owner = None if object_of is None else object_of(arguments)
        try:  # an interrupt may come as soon as it has begun
            begin(part, owner)
            result = function(*arguments, **keywords)
        except BaseException as error:
            end(part, owner, type(error))
            _leave_out_caller(error)
            raise
        end(part, owner, None)
        return result

    def retire() -> None:
        nonlocal is_none
        is_none = _always

    return in_phase, retire


def _bare(function: Callable[..., Any], call: _Call) -> Wrapper:
    """``function`` as a phase, with no function of Python's around it."""
    parts = [int(call.part)]
    as_phase = functools.partial(python_sources.in_phase, parts)
    if call.object_of is not None:
        return _BareMethod(as_phase, function, call.object_of), parts.clear
    return functools.update_wrapper(functools.partial(as_phase, None, function), function), parts.clear


class _BareMethod:
    """A method as a phase of what ``object_of`` finds."""

    def __init__(
        self,
        as_phase: Callable[..., Any],
        function: Callable[..., Any],
        object_of: Callable[[tuple[Any, ...]], Any],
    ) -> None:
        self._as_phase, self._function, self._object_of = as_phase, function, object_of
        functools.update_wrapper(self, function)

    def __call__(self, owner: Any, *arguments: Any, **keywords: Any) -> Any:
        return self._as_phase(self._object_of((owner,)), self._function, owner, *arguments, **keywords)

    def __get__(self, owner: Any, _kind: type | None = None) -> Callable[..., Any]:
        if owner is None:
            return self
        return functools.partial(self._as_phase, self._object_of((owner,)), self._function, owner)


def _giving(method: Callable[..., Any], call: _Call) -> Wrapper:
    """Wraps ``method`` such that the function in its first argument becomes a phase."""
    given = True

    @functools.wraps(method)
    def with_phase(owner: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return method(owner, _phase(function, call)[0] if given else function, *arguments, **keywords)

    def retire() -> None:
        nonlocal given
        given = False

    return with_phase, retire


def _generating(function: Callable[..., Any]) -> Wrapper:
    """Wraps ``GenerationMixin.generate`` as a phase with metadata; returns the wrapper and its off switch. Costs some 20 us per call."""
    begin, end, is_none = python_sources.generate_begin, python_sources.generate_end, python_sources.in_graph

    @functools.wraps(function)
    def generate(*arguments: Any, **keywords: Any) -> Any:
        if is_none() or not arguments:
            return function(*arguments, **keywords)
        model, call = arguments[0], generations.begun(arguments, keywords)
        try:  # an interrupt may come as soon as it has begun
            begin(model, 1 if call is None else call.prefills)
            result = function(*arguments, **keywords)
            generations.ended(call, model, result, None)
        except BaseException as error:
            generations.ended(call, model, None, error)
            end(model, type(error))
            _leave_out_caller(error)
            raise
        end(model, None)
        return result

    def retire() -> None:
        nonlocal is_none
        is_none = _always

    return generate, retire


def _leave_out_caller(error: BaseException) -> None:
    """Removes the caller, which handles the error, from its traceback. Without effect in Python 3.10, which restores the traceback."""
    traceback = error.__traceback__
    error.__traceback__ = None if traceback is None else traceback.tb_next


def _always() -> bool:
    return True


leave_uncompiled(__name__)

shared = WrappedCalls(_CALLS, _wrapper)
"""The wrapped functions of the process."""
