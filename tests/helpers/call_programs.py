"""Programs with calls of every sort, without torch, the same each time they run. Their calls are compared with other tracers'.

Recursion, exceptions, generators and `with` are in the programs of random_calls.py.

What is called here is written here or in C, except where a name says so: the library's own Python differs by version.
"""

# How things are called is the point here, so all ways of calling them are right.
# ruff: noqa: B009, C400, C408, C410, PIE804, PLC3002, PLW0108, S102, S307, SIM905, UP032

from __future__ import annotations

import functools
import io
import operator
import types
from typing import TYPE_CHECKING

import class_programs

if TYPE_CHECKING:
    from collections.abc import Callable


def _leaf(*_values):
    return len("leaf")


# ---- functions ----


def _closure(start):
    count = start

    def more():
        nonlocal count
        count += 1
        return _leaf()

    return more


def functions():
    """Lambdas, closures, partial functions, defaults that are calls, bound and unbound methods, arguments in stars."""
    more = _closure(1)
    more(), more()
    (lambda value: _leaf(value))(1)
    functools.partial(_leaf, 1)()
    functools.partial(functools.partial(len), "leaf")()
    operator.methodcaller("upper")("leaf")
    operator.attrgetter("real")(1)
    _leaf(*(1, 2), **{})
    str.upper("leaf")
    list.append([], 1)
    append = [].append
    append(1)
    types.MethodType(_leaf, 1)()


def keywords():
    """C functions with keywords and with arguments in stars; types, which are no functions."""
    sorted([2, 1], reverse=True)
    max([], default=0)
    sum([1, 2], start=1)
    "1 2".split(sep=" ", maxsplit=1)
    "{} {name}".format(1, name=2)
    print("text", file=io.StringIO(), end="")
    (1).to_bytes(length=2, byteorder="big")
    int("11", base=2), dict(a=1), list((1,)), str(b"a", encoding="ascii")
    max(*(1, 2), **{"key": abs})
    len(*("leaf",))
    getattr(1, "real"), isinstance(1, int), hasattr(1, "imag")


def sources():
    """What eval and exec run."""
    eval("_leaf()")
    exec(_SOURCE, {})
    exec("class Made: size = len('leaf')", {})


_SOURCE = compile("def made_here():\n  return len('leaf')\nmade_here()", "<made>", "exec")


def _failing(depth):
    if depth == 0:
        raise ValueError(depth)
    _failing(depth - 1)


class _Turn:
    def __await__(self):
        yield _leaf()


async def _coroutine(turns):
    for _ in range(turns):
        await _Turn()
    return _leaf()


async def _waiting(turns):
    return await _coroutine(turns) + await _coroutine(turns)


async def _asynchronous(turns):
    for number in range(turns):
        await _Turn()
        yield number


class _AsyncManager:
    async def __aenter__(self):
        await _Turn()

    async def __aexit__(self, *error):
        await _Turn()


async def _consuming(turns):
    async with _AsyncManager():
        async for _ in _asynchronous(turns):
            _leaf()
    return [number async for number in _asynchronous(turns)]


async def _failing_coroutine():
    async with _AsyncManager():
        await _Turn()
        _failing(1)


def _take_turns(coroutines):
    while coroutines:
        first, *coroutines = coroutines
        try:
            first.send(None)
        except (StopIteration, ValueError):
            _leaf()
        else:
            coroutines = [*coroutines, first]


def coroutines():
    """Coroutines, asynchronous generators and managers that take turns."""
    _take_turns([_coroutine(2), _waiting(1), _consuming(2), _failing_coroutine()])


def comprehensions():
    """Lists, sets, dictionaries and generators in one expression, and some within others."""
    [_leaf(value) for value in range(2)]
    {_leaf(value) for value in range(2)}
    {value: _leaf(value) for value in range(2)}
    list(_leaf(value) for value in range(2))
    [[_leaf(inner) for inner in range(outer)] for outer in range(3)]
    [value for value in range(2) if _leaf(value)]


PROGRAMS: tuple[Callable[[], object], ...] = (
    functions,
    keywords,
    sources,
    coroutines,
    comprehensions,
    *class_programs.PROGRAMS,
)
