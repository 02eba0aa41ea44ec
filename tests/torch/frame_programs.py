"""Programs with calls of every sort. Their frames are compared with those of torch's own tracer."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def _twice(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args), function(*args)

    return wrapped


@_twice
def _decorated(x):
    return x


def _failing(depth):
    if depth == 0:
        raise ValueError(depth)
    _failing(depth - 1)


def _recursive(depth):
    return _recursive(depth - 1) if depth else torch.ones(1)


def _generator():
    yield 1
    torch.zeros(1)
    yield 2


async def _coroutine(x):
    return x


class _Object:
    def __init__(self):
        self.value = 1

    @property
    def doubled(self):
        return 2 * self.value

    @staticmethod
    def static():
        return 1

    @classmethod
    def of_class(cls):
        return 2

    def __len__(self):
        return 3


_SOURCE = compile("def made_here():\n  return 1\nmade_here()", "<string>", "exec")
"""Kept: torch takes names from where the text of a code object was, also when that has gone."""


def functions():
    """Functions of Python and C, methods, what a class body runs, exceptions, generators, coroutines."""
    _decorated(1)
    _recursive(3)
    with contextlib.suppress(ValueError):
        _failing(3)
    list(_generator())
    with contextlib.suppress(StopIteration):
        _coroutine(1).send(None)
    made = _Object()
    made.doubled, made.static(), made.of_class(), len(made)
    sorted([3, 1], key=lambda value: -value)
    (
        ["b"].index("b"),
        ", ".join(str(i) for i in range(2)),
        {}.get(1),
        {1: 2}.get(1),
        max(*(1, 2), key=lambda value: value),
    )
    [abs(value) for value in (1, -1)]
    exec(_SOURCE, {})  # noqa: S102

    class _Body:
        length = len("a")

    tensor = torch.ones(2, requires_grad=True)
    tensor.mul(2).sum(), tensor * 3, torch.nn.functional.relu(tensor)


class _Inner(torch.nn.Module):
    def forward(self, x):
        return x.relu()


def _namesake():
    class _Inner(torch.nn.Module):
        def forward(self, x):
            return x.sigmoid()

    return _Inner()


class _Caller(torch.nn.Module):
    def __call__(self, *args):
        return super().__call__(*args)

    def forward(self, x):
        return x + 1


class Net(torch.nn.Module):
    """Modules within modules: two of one class, one of another class of the same name, one with a __call__ of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), _Inner(), torch.nn.Linear(2, 2), _Inner())
        self.other, self.caller = _namesake(), _Caller()

    def forward(self, x):
        return self.caller(self.other(self.layers(x)))


def modules():
    """Calls of modules, twice, without autograd."""
    net, x = Net(), torch.ones(1, 2)
    with torch.no_grad():
        net(x)
        net(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def training():
    """A step of training: forward, backward through a function of Python too, an optimizer; a label of torch's around it."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.profiler.record_function("step"):
        loss = _Cube.apply(net(torch.ones(1, 2)).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


PROGRAMS: tuple[Callable[[], object], ...] = (functions, modules, training)


def masked(name: str) -> str:
    """A name without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", name)


def described(events: Any, program: Callable[[], object]) -> list[tuple[Any, ...]]:
    """What is inside a program: names, nesting, stacks (from the program inwards), and what torch knows of calls."""
    mark = f"): {program.__name__}"
    found = []
    first = min((event.sequence_nr for event in events if event.sequence_nr >= 0), default=0)
    for event in events:
        stack = [masked(entry) for entry in reversed(event.stack)]
        depth = next((depth for depth, entry in enumerate(stack) if entry.endswith(mark)), None)
        if depth is None:
            continue
        found.append(
            (
                masked(event.name),
                stack[depth:],
                event.scope,
                max(event.sequence_nr - first, -1),
                event.is_python_function,
                event.activity_type,
                event.python_module_id,
                masked(event.cpu_parent.name),
                [masked(child.name) for child in event.cpu_children],
            )
        )
    return found


def python_ids(events: Any, program: Callable[[], object]) -> list[tuple[int, int]]:
    """The calls inside a program, counted from its own in the order of their numbers, each with its caller.

    Counted here, since calls of other threads, if one wakes, take numbers too.
    """
    calls = {event.python_id: event for event in events if event.is_python_function}
    first = next(number for number, event in calls.items() if event.name.endswith(f"): {program.__name__}"))
    places = {first: 0}
    found = []
    for number in sorted(calls):
        caller = calls[number].python_parent_id
        if caller in places:
            places[number] = len(places)
            found.append((places[number], places[caller]))
    return found
