"""The modules that running functions hold: in their variables, and in what these are made of."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._native import python_sources

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator

_MOST = 1000
"""Variables of a function that are looked at, and attributes of an object."""


def modules_of(frame: types.FrameType | None) -> list[Any]:
    """The modules of a stack of functions, without the parts of those that are among them; from the calls of a module inwards, none.

    Looked at are variables, the attributes of an object that has them, and what is in a list, tuple or dict. Nothing of the
    program's is called.
    """
    kind = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    frames: list[types.FrameType] = []
    while frame is not None:
        frames = [] if frame.f_code.co_name == "_call_impl" else [*frames, frame]
        frame = frame.f_back
    if kind is None:
        return []
    found = {id(module): module for frame in frames for module in _held(python_sources.variables_of(frame), kind)}
    parts = {id(part) for module in found.values() for part in _parts(module)}
    return [module for key, module in found.items() if key not in parts]


def _held(variables: list[Any], kind: type) -> Iterator[Any]:
    for value in variables[:_MOST]:
        if issubclass(type(value), kind):  # isinstance asks the object for its class
            yield value
        else:
            yield from (inner for inner in _inside(value) if issubclass(type(inner), kind))


def _inside(value: Any) -> Iterable[Any]:
    if type(value) in {list, tuple}:
        return value[:_MOST]  # type: ignore[no-any-return]
    if type(value) is dict:
        return list(value.values())[:_MOST]
    # Not getattr: that may be the program's own code.
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return ()
    return list(attributes.values())[:_MOST] if type(attributes) is dict else ()


def _parts(module: Any) -> Iterator[Any]:
    """The modules inside of a module, at any depth; read as torch keeps them, since ``modules()`` may be the program's own."""
    waiting, seen = [module], set()
    while waiting:
        inner = object.__getattribute__(waiting.pop(), "__dict__").get("_modules") or {}
        for part in inner.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
                yield part
