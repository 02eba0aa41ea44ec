"""Python and C calls to be recorded. Needs no torch: it runs under every interpreter.

``empty_calls``, ``c_calls``, ``generators`` and ``tree`` do their work so many times.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def empty_calls(count: int) -> None:
    """Calls of a Python function that does nothing."""
    function = _empty
    for _ in itertools.repeat(None, count):
        function()


def c_calls(count: int) -> None:
    """Calls of a function of C that does next to nothing."""
    size, nothing = len, ()
    for _ in itertools.repeat(None, count):
        size(nothing)


def generators(count: int) -> None:
    """Generators that go on five times each."""
    for _ in itertools.repeat(None, count):
        for _ in _prices(5):
            pass


def tree(count: int) -> None:
    """Recursion, methods, a generator, a comprehension and functions of C, as a program has them."""
    for _ in itertools.repeat(None, count):
        _fibonacci(6)
        cart = _Cart()
        for price in _prices(5):
            cart.add(price)
        [cart.total() for _ in range(3)]
        sorted(cart.items, key=_negative)


def calls_of(work: Callable[[int], object]) -> int:
    """How many calls one of these makes each time, as Python's own ``sys.setprofile`` counts them.

    A comprehension is a call before Python 3.12; each time that a generator continues is one, too.
    """
    counts = []
    for times in (1, 2):
        seen = 0

        def count(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal seen
            seen += event in {"call", "c_call"}

        sys.setprofile(count)
        work(times)
        sys.setprofile(None)
        counts.append(seen)
    return counts[1] - counts[0]


def _empty() -> None:
    pass


def _fibonacci(n: int) -> int:
    return n if n < 2 else _fibonacci(n - 1) + _fibonacci(n - 2)


def _prices(count: int) -> Iterator[int]:
    for price in range(count):  # noqa: UP028 - each turn is to be one of this function's
        yield price


def _negative(number: int) -> int:
    return -number


class _Cart:
    def __init__(self) -> None:
        self.items: list[int] = []

    def add(self, price: int) -> None:
        self.items.append(price)

    def total(self) -> int:
        return sum(self.items)
