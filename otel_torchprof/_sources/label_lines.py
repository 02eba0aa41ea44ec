"""Lists of functions to be labelled: what their lines say, and which function each stands for."""

from __future__ import annotations

import importlib.util
import inspect
import os
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_FORM = "package.module:function or package.module:Class.method, then a name for the label if you like"


class LineError(ValueError):
    """What is wrong with a line, with its place, its text and the way out."""


class MissingError(LineError):
    """The module or class has nothing of that name."""


class Line(NamedTuple):
    """One function that is to be labelled."""

    target: str
    """As it is written: ``package.module:Class.method``."""
    label: str
    place: str
    """File and line."""

    def error(self, why: str, kind: type[LineError] = LineError) -> LineError:
        """With the line's place and text."""
        return kind(f"{self.place}: {self.target!r} cannot be labelled: {why}")

    def splits(self) -> list[tuple[str, tuple[str, ...]]]:
        """Each module that it may be in, with the path of the function there; without a colon any number of parts may be."""
        module, colon, path = self.target.partition(":")
        if colon:
            return [(module, tuple(path.split(".")))]
        parts = module.split(".")
        return [(".".join(parts[:at]), tuple(parts[at:])) for at in range(1, len(parts))]


def read_lines(source: str | os.PathLike[str] | Iterable[str]) -> tuple[list[Line], list[LineError]]:
    """The functions of a file, or of a list of lines, and what is wrong with other lines.

    Raises:
        TypeError: neither of them.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        texts, place = _texts_of(Path(source)), f"{os.fspath(source)}:"
    elif isinstance(source, Iterable) and not isinstance(source, bytes):
        texts, place = list(source), "line "
    else:
        raise TypeError(f"label_functions() got {source!r}; it takes the path of a file, or a list of lines: {_FORM}")
    lines, errors = [], []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"line {number} is {text!r}; it must be a str: {_FORM}")
        try:
            lines += _line_of(text, f"{place}{number}")
        except LineError as error:
            errors.append(error)
    return lines, errors


def _texts_of(path: Path) -> list[str]:
    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}; names are given as a list: label_functions([{str(path)!r}])")
    if not path.is_file():
        raise OSError(f"{str(path)!r} is no file; name one with a function in each line")
    return path.read_text(encoding="utf-8-sig").splitlines()


def _line_of(text: str, place: str) -> list[Line]:
    words = text.split()
    comment = next((at for at, word in enumerate(words) if word.startswith("#")), len(words))
    if not comment:
        return []
    target, label = words[0], " ".join(words[1:comment])
    module, colon, path = target.partition(":")
    names = [*module.split("."), *(path.split(".") if colon else ())]
    if len(names) < 2 or not all(name.isidentifier() for name in names):  # noqa: PLR2004 - a module and a function
        raise LineError(f"{place}: {text.strip()!r} names no function; write {_FORM}")
    return [Line(target, label or target.replace(":", "."), place)]


class Found(NamedTuple):
    """A function that can be labelled."""

    owner: Any
    """The module or class that it is looked up in."""
    name: str
    raw: Any
    """What stands there: the function, or a staticmethod or classmethod."""
    is_own: bool
    """False: the class has it from another one."""


def find(line: Line, module: types.ModuleType, path: tuple[str, ...]) -> Found | None:
    """The function of a line in a module that is imported; None where it is in a module inside of that.

    Imports nothing, runs no code of the module's.

    Raises:
        LineError: there is none, or it is nothing that can be labelled.
    """
    owner: Any = module
    for name in path[:-1]:
        inner = vars(owner).get(name, owner)
        if isinstance(inner, types.ModuleType) or inner is owner:
            if owner is module and ":" not in line.target and _is_module(module, name):
                return None
            if inner is owner:
                raise _missing(line, owner, name)
            raise line.error(f"{name} is a module: put the colon behind it")
        if not inspect.isclass(inner):
            raise line.error(f"{name} is {_kind(inner)}, neither a module nor a class")
        owner = inner
    return _checked(line, owner, path[-1])


def _is_module(module: types.ModuleType, name: str) -> bool:
    if isinstance(vars(module).get(name), types.ModuleType):
        return True
    if not hasattr(module, "__path__"):
        return False
    return importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def _checked(line: Line, owner: Any, name: str) -> Found:
    is_class, own = inspect.isclass(owner), vars(owner)
    raw = own.get(name, owner)
    if raw is owner and is_class:
        raw = inspect.getattr_static(owner, name, owner)
    if raw is owner:
        raise _missing(line, owner, name)
    inner = raw.__func__ if is_class and isinstance(raw, staticmethod | classmethod) else raw
    allowed = (types.FunctionType, types.MethodDescriptorType if is_class else types.BuiltinFunctionType)
    if not isinstance(inner, allowed):
        raise line.error(f"{name} is {_kind(inner)}; name a function or a method")
    return Found(owner, name, raw, name in own)


def _missing(line: Line, owner: Any, name: str) -> LineError:
    hint = "; a script's functions can be labelled once they are defined" if owner.__name__ == "__main__" else ""
    return line.error(f"{owner.__name__} has no {name}; name the module or class that defines it{hint}", MissingError)


def _kind(thing: Any) -> str:
    return "a class" if inspect.isclass(thing) else f"of type {type(thing).__qualname__}"
