"""``functools.cached_property`` without its lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 - the name that readers know
    """A method whose first result becomes an attribute of the instance, under the method's name.

    ``functools.cached_property`` holds a lock of the class up to Python 3.11: a child forked while the method runs would wait
    forever, and instances wait for each other. Here two threads may compute the same value; the last one stays.
    """

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> cached_property[T] | T:
        """Called only while the instance has no attribute of that name, which precedes a descriptor without ``__set__``."""
        if instance is None:
            return self
        value = vars(instance)[self._name] = self._method(instance)
        return value
