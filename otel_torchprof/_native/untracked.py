"""Dataclasses whose objects Python's garbage collector neither counts nor visits."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from .ffi import python_sources

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
