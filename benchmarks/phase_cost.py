"""What a phase costs at its two boundaries: of a function that is wrapped, an optimizer's step and a root's call, beside empty hooks."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from harness import OURS, Budget, Row, Settings, in_turn, no_collections, rows
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizers

from otel_torchprof._columns.schema import Kind
from otel_torchprof._native.recorder import Session
from otel_torchprof._record.phases import Phases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EMPTY = "empty Python hooks"
_OFF = "otel-torchprof, nobody records"
_LIMIT = 1400.0
"""Nanoseconds for both boundaries, beyond what torch takes to call hooks."""
_SECONDS, _ROUNDS = 0.01, 60
_NAME = "_clip_grads_with_norm_"


class _Optimizer(torch.optim.Optimizer):
    """One whose step is empty."""

    def step(self, closure: Any = None) -> None:
        pass


def measure(settings: Settings) -> list[Row]:
    """Each kind of boundary, recorded and while nobody records."""
    table: list[Row] = []
    for what, call, empty in (
        ("wrapped function", _wrapped_function, _empty_wrapper),
        ("optimizer's step", _optimizer_step, _empty_optimizer_hooks),
        ("root's call", _root_call, _empty_module_hooks),
    ):
        contestants = {
            _EMPTY: functools.partial(_added, call, empty),
            _OFF: functools.partial(_added, call, functools.partial(_phases, kinds=(Kind.LABEL,))),
            OURS: functools.partial(_added, call, functools.partial(_phases, kinds=(Kind.PHASE,))),
        }
        budgets = {OURS: Budget(_EMPTY, 1.0, _LIMIT)}
        table += rows(f"phase: {what}", "ns", in_turn(contestants, settings.rounds_or(_ROUNDS)), budgets)
    return table


def _added(make: Callable[[], Callable[[], Any]], hooked: Callable[..., Any]) -> float:
    """Nanoseconds that a call takes longer with the hooks there than right before without them."""
    call = make()
    with no_collections():
        without = _per_call(call)
        with hooked(call):
            call()  # a root is found
            return _per_call(call) - without


def _per_call(call: Callable[[], Any]) -> float:
    begin = time.process_time_ns()
    done = 0
    while time.process_time_ns() - begin < _SECONDS * 1e9:
        for _ in range(200):
            call()
        done += 200
    return (time.process_time_ns() - begin) / done


def _wrapped_function() -> Callable[[], Any]:
    return lambda: clip_grad._clip_grads_with_norm_((), 1.0, None)  # with nothing to do


def _optimizer_step() -> Callable[[], Any]:
    optimizer = _Optimizer([torch.ones(1)], {})
    return lambda: optimizer.step()  # noqa: PLW0108 - as programs call it


def _root_call() -> Callable[[], Any]:
    module = torch.nn.Identity()
    return lambda: module(None)


@contextlib.contextmanager
def _phases(_call: Any, kinds: tuple[Kind, ...]) -> Iterator[None]:
    """The hooks, and a session that records phases or nothing."""
    session = Session(64 << 20, keep_newest=True, all_threads=True, kinds=kinds)
    source = Phases()
    session.start()
    try:
        source.start(session)
        yield
    finally:
        source.stop()
        session.stop()


@contextlib.contextmanager
def _empty_wrapper(_call: Any) -> Iterator[None]:
    """Begins and ends nothing, also where an exception leaves it."""
    inner = getattr(clip_grad, _NAME)

    @functools.wraps(inner)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        _nothing()
        try:
            return inner(*arguments, **keywords)
        finally:
            _nothing()

    setattr(clip_grad, _NAME, wrapper)
    try:
        yield
    finally:
        setattr(clip_grad, _NAME, inner)


@contextlib.contextmanager
def _empty_optimizer_hooks(_call: Any) -> Iterator[None]:
    handles = [
        torch_optimizers.register_optimizer_step_pre_hook(_nothing),
        torch_optimizers.register_optimizer_step_post_hook(_nothing),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _empty_module_hooks(call: Any) -> Iterator[None]:
    (module,) = (cell.cell_contents for cell in call.__closure__)
    handles = [module.register_forward_pre_hook(_nothing), module.register_forward_hook(_nothing, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing(*_arguments: Any) -> None:
    pass
