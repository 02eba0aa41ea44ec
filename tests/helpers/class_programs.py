"""Programs with classes, and with what Python and C functions call by themselves; see call_programs.py."""

# How things are called is the point here, so all ways of calling them are right.
# ruff: noqa: B009, B018

from __future__ import annotations

import functools
import re
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _leaf(*_values):
    return len("leaf")


def _twice(function):
    @functools.wraps(function)
    def wrapped(*arguments):
        return function(*arguments), function(*arguments)

    return wrapped


@_twice
@_twice
def _decorated(value):
    return _leaf(value)


@functools.lru_cache
def _cached(value):
    return _leaf(value)


def decorators():
    """Decorated functions, what runs when they are made, and functions that are remembered."""

    @_twice
    def made_here():
        return _leaf()

    _decorated(1)
    made_here()
    _cached.cache_clear()
    _cached(1), _cached(1), _cached(2)


class _Meta(type):
    @classmethod
    def __prepare__(cls, name, bases):
        return {"size": _leaf()}

    def __new__(cls, name, bases, space):
        return super().__new__(cls, name, bases, space)

    def __init__(cls, name, bases, space):
        super().__init__(name, bases, space)

    def __call__(cls, *arguments):
        return super().__call__(*arguments)


class _Descriptor:
    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, instance, owner=None):
        return _leaf()

    def __set__(self, instance, value):
        _leaf(value)


class _Base:
    def __init_subclass__(cls):
        _leaf()

    def __init__(self, value):
        self._value = value

    @property
    def value(self):
        return _leaf(self._value)

    @value.setter
    def value(self, value):
        self._value = value

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return _leaf()

    @staticmethod
    def static():
        return _leaf()

    @classmethod
    def of_class(cls):
        return _leaf()


def classes():
    """Classes while they are made and after: metaclasses, constructors, properties, descriptors, methods of all sorts."""

    class Made(_Base, metaclass=_Meta):
        described = _Descriptor()
        length = len("leaf")

        def __init__(self, value):
            super().__init__(value)

    made = Made(1)
    made.value = made.value
    made.described = made.described
    made.missing
    hasattr(made, "_missing")
    made.static(), made.of_class(), Made.static(), Made.of_class()
    getattr(made, "value"), setattr(made, "value", 1)
    type("Dynamic", (_Base,), {})


class _Number:
    def __init__(self, value):
        self._value = value

    def __add__(self, other):
        return _Number(self._value + other._value)

    def __lt__(self, other):
        return self._value < other._value

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return hash(self._value)

    def __len__(self):
        return _leaf()

    def __getitem__(self, index):
        return (_leaf(), _leaf())[index]

    def __repr__(self):
        return "a number"

    def __format__(self, spec):
        return f"{self!r}"

    def __bool__(self):
        return bool(_leaf())

    def __call__(self):
        return _leaf()

    def __del__(self):
        _leaf()


def operators():
    """Methods that operators and C functions call: arithmetic, comparison, hashes, indices, texts, finalizers."""
    made = [_Number(1), _Number(2)]
    made[0] + made[1]
    made[0] < made[1], made.index(made[1]), made[1] in made
    {made[0]: 1}[made[0]]
    len(made[0]), list(made[0]), made[0][0]
    f"{made[0]}", repr(made[0]), [str(made[0])]
    made[0]() if made[1] else None
    sorted(made), min(made)
    made.clear()


def callbacks():
    """C functions that call Python: keys, folds, maps, replacements, iterators made of functions."""
    sorted([3, 1, 2], key=lambda value: -value)
    [2, 1].sort(key=_leaf)
    list(map(_leaf, [1, 2]))
    list(filter(lambda value: value, [0, 1]))
    functools.reduce(lambda so_far, value: so_far + value, [1, 2, 3])
    _WORD.sub(lambda match: match.group().upper(), "two words")
    max([1, 2], key=_leaf)
    next(iter(_leaf, 5))
    any(map(_leaf, [1]))
    sorted([1, 2], key=functools.cmp_to_key(lambda one, other: _leaf()))
    weakref.ref(_Weak(), _leaf)


_WORD = re.compile("[a-z]+")


class _Weak:
    pass


PROGRAMS: tuple[Callable[[], object], ...] = (decorators, classes, operators, callbacks)
