"""Labels without a change of code: functions named in a file or a list are labelled at their place of definition."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.after_import import is_there, when_imported
from otel_torchprof.errors import warn_once

from .labels import is_labelled, record_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


# ---- Lists of functions to label: parsing of lines, and search of their functions ----

_FORM = "package.module:function or package.module:Class.method, then a name for the label if you like"


class LineError(ValueError):
    """A line is wrong; the message has its place, its text and how to fix it."""


class MissingError(LineError):
    """The module or class has nothing of that name."""


class FunctionLine(NamedTuple):
    """A line that names a function to label."""

    target: str
    """The function, as written in the file: ``package.module:Class.method``."""
    label: str
    place: str
    """File and line."""

    def error(self, why: str, kind: type[LineError] = LineError) -> LineError:
        """Creates an error with the line's place and text."""
        return kind(f"{self.place}: {self.target!r} cannot be labelled: {why}")

    def splits(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns possible pairs of module and path in it; without a colon, each dot may be the separator."""
        module, colon, path = self.target.partition(":")
        if colon:
            return [(module, tuple(path.split(".")))]
        parts = module.split(".")
        return [(".".join(parts[:at]), tuple(parts[at:])) for at in range(1, len(parts))]


def read_lines(source: str | os.PathLike[str] | Iterable[str]) -> tuple[list[FunctionLine], list[LineError]]:
    """Parses a file, or a list of lines; returns the functions, and the errors of bad lines.

    Raises:
        TypeError: ``source`` is neither of them.
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


def _line_of(text: str, place: str) -> list[FunctionLine]:
    words = text.split()
    comment = next((at for at, word in enumerate(words) if word.startswith("#")), len(words))
    if not comment:
        return []
    target, label = words[0], " ".join(words[1:comment])
    module, colon, path = target.partition(":")
    names = [*module.split("."), *(path.split(".") if colon else ())]
    if len(names) < 2 or not all(name.isidentifier() for name in names):  # noqa: PLR2004 - a module and a function
        raise LineError(f"{place}: {text.strip()!r} names no function; write {_FORM}")
    return [FunctionLine(target, label or target.replace(":", "."), place)]


class FoundFunctions(NamedTuple):
    """A function that can be labelled."""

    owner: Any
    """The module or class that it is looked up in."""
    name: str
    raw: Any
    """The attribute itself: the function, or a staticmethod or classmethod."""
    is_own: bool
    """False: the class has it from another one."""


def find(line: FunctionLine, module: types.ModuleType, path: tuple[str, ...]) -> FoundFunctions | None:
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


def _checked(line: FunctionLine, owner: Any, name: str) -> FoundFunctions:
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
    return FoundFunctions(owner, name, raw, name in own)


def _missing(line: FunctionLine, owner: Any, name: str) -> LineError:
    hint = "; a script's functions can be labelled once they are defined" if owner.__name__ == "__main__" else ""
    return line.error(f"{owner.__name__} has no {name}; name the module or class that defines it{hint}", MissingError)


def _kind(thing: Any) -> str:
    return "a class" if inspect.isclass(thing) else f"of type {type(thing).__qualname__}"


_logger = logging.getLogger("otel_torchprof")


def label_functions(source: str | os.PathLike[str] | Iterable[str]) -> FunctionLabels:
    """Labels functions by name, as if each had the decorator ``record_function``, until the result's ``remove()``.

    Works for functions, methods, static and class methods, generators, coroutines, async generators, and C functions of
    modules. Functions in modules that are not imported yet are labelled at the import; nothing is imported here.

    A function is replaced in its module or class. Code that fetched it before, as ``from module import function`` does,
    calls it without the label. Functions that have a label get no second one. Thread-safe. A call costs what a label
    costs, even while nothing is recorded.

    Args:
        source: path of a file, or a list of its lines: ``package.module:function`` or ``package.module:Class.method``,
            optionally followed by a space and the name of the label. A dot may replace the colon; ``#`` starts a
            comment.

    Returns:
        The labelled functions, also a context manager.

    Raises:
        TypeError: ``source`` is neither a path nor a list of lines.
        OSError, UnicodeDecodeError: the file cannot be read.
        ValueError: a line does not name a function, or its function does not exist in an imported module; then no
            function is labelled. For modules that are imported later this is logged once.

    Examples:
        >>> import json
        >>> with otp.label_functions(["json:dumps serialize"]), otp.profile() as prof:
        ...     text = json.dumps([1])
        >>> [event.name for event in prof.events()]
        ['serialize']
    """
    lines, errors = read_lines(source)
    if errors:
        raise errors[0]
    for line in lines:
        _check_that_module_exists(line)
    return FunctionLabels(lines, is_strict=True)


def _check_that_module_exists(line: FunctionLine) -> None:
    top = line.target.partition(":")[0].partition(".")[0]
    if not is_there(top):
        raise line.error(f"there is no module {top} on sys.path")


class FunctionLabels:
    """Labelled functions: the result of :func:`label_functions`.

    A context manager that calls :meth:`remove`. Thread-safe.

    Examples:
        >>> import json
        >>> labels = otp.label_functions(["json:dumps", "xmlrpc.server:resolve_dotted_attribute"])
        >>> labels.labelled, labels.waiting
        (('json:dumps',), ('xmlrpc.server:resolve_dotted_attribute',))
        >>> labels.remove()
        ()
    """

    def __init__(self, lines: Iterable[FunctionLine], *, is_strict: bool, is_early: bool = False) -> None:
        self._is_early = is_early
        self._undefined: dict[FunctionLine, tuple[str, ...]] = {}
        self._errors: list[LineError] | None = [] if is_strict else None
        self._waits: set[FunctionLine] = set()
        self._calls: list[Callable[[], None]] = []
        self._entries: dict[FunctionLine, _LabelledFunction] = {}
        self._removed = False
        for line in lines:
            self._add(line)
        errors, self._errors = self._errors, None  # later errors have no caller to raise to
        if errors:
            self.remove()
            raise errors[0]

    @property
    def labelled(self) -> tuple[str, ...]:
        """The functions that have their label, as written in the source."""
        with _lock:
            return tuple(line.target for line in self._entries)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Functions of modules that are not imported yet, and of a started script that has not defined them yet."""
        with _lock:
            return tuple(sorted(line.target for line in self._waits))

    def look_again(self, *, is_early: bool) -> None:
        """Labels functions that the script has defined since.

        Unless ``is_early``, warns of missing ones and gives them up.
        """
        if self._undefined:
            with _lock:
                self._is_early = is_early
                undefined, self._undefined = self._undefined, {}
            for line, path in undefined.items():
                self._on_module(line, path, sys.modules["__main__"])

    def remove(self) -> tuple[str, ...]:
        """Restores every function and stops waiting for modules. A second call has no effect.

        Returns:
            Functions that stay labelled, because another tool has replaced or wrapped the labelled function.
        """
        with _lock:
            self._removed = True
            entries, self._entries = self._entries, {}
            calls, self._calls = self._calls, []
            self._waits.clear()
            self._undefined.clear()
            left = [line.target for line, entry in entries.items() if not entry.leave(self)]
        for call_off in calls:
            call_off()
        return tuple(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _add(self, line: FunctionLine) -> None:
        # Without the lock: it may wait for another thread's import.
        self._waits.add(line)
        for module, path in line.splits():
            self._calls.append(when_imported(module, functools.partial(self._on_module, line, path)))

    def _on_module(self, line: FunctionLine, path: tuple[str, ...], module: types.ModuleType) -> None:
        try:
            with _lock:
                if not self._removed and line not in self._entries:
                    functions = find(line, module, path)
                    if functions is not None:
                        self._label(line, functions)
        except LineError as error:
            if self._is_early and module.__name__ == "__main__" and isinstance(error, MissingError):
                self._undefined[line] = path
            else:
                self._note(line, error)
        except Exception as error:  # noqa: BLE001 - a class may refuse the change with any error
            self._note(line, line.error(f"{module.__name__} does not let it be replaced: {error!r}"))

    def _label(self, line: FunctionLine, functions: FoundFunctions) -> None:
        key = id(functions.owner), functions.name
        entry = _entries.get(key)
        if entry is not None and entry.is_there():
            if entry.line.label != line.label:
                raise line.error(f"it is labelled {entry.line.label!r} already, by {entry.line.place}")
        elif is_labelled(_function_of(functions.raw)):
            self._waits.discard(line)
            return
        else:
            entry = _entries[key] = _LabelledFunction(line, functions)
        entry.users.add(self)
        self._entries[line] = entry
        self._waits.discard(line)

    def _note(self, line: FunctionLine, error: LineError) -> None:
        with _lock:
            self._waits.discard(line)
        if self._errors is not None:
            self._errors.append(error)
        else:
            warn_once(f"{error}; it is ignored")


class _LabelledFunction:
    """A labelled function and the users of its label. Used under the lock."""

    def __init__(self, line: FunctionLine, functions: FoundFunctions) -> None:
        self.line = line
        self.users: set[FunctionLabels] = set()
        self._functions = functions
        function = _function_of(functions.raw)
        labelled: Any = record_function(line.label)(function)
        self._label = labelled if function is functions.raw else type(functions.raw)(labelled)
        setattr(functions.owner, functions.name, self._label)

    def is_there(self) -> bool:
        """Whether the label is still in place."""
        return vars(self._functions.owner).get(self._functions.name) is self._label

    def leave(self, user: FunctionLabels) -> bool:
        """Removes the label with its last user; False if it cannot be removed."""
        self.users.discard(user)
        if self.users:
            return True
        owner, name, raw, is_own = self._functions
        if _entries.get((id(owner), name)) is self:
            del _entries[id(owner), name]
        if not self.is_there():
            return False
        if is_own:
            setattr(owner, name, raw)
        else:
            delattr(owner, name)
        return True


def _function_of(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


_entries: dict[tuple[int, str], _LabelledFunction] = {}
"""By id of the owner, which the entry keeps alive, and name."""
_lock = threads.RLock()


# ---- The file in the environment variable ----


_of_environment: dict[str, FunctionLabels] = {}
"""Labels by file; more than one file only if the program changes its environment."""


def label_by_environment(*, is_early: bool = False) -> None:
    """Labels the functions listed in the file of ``OTEL_TORCHPROF_LABELS``, once per process, permanently.

    Raises nothing. ``is_early``: the script may not have defined its functions yet; they are searched again on every
    call, until a call without it.
    """
    path = config.LABELS.read()
    if path is None:
        return
    if path in _of_environment:
        _of_environment[path].look_again(is_early=is_early)
        return
    try:
        lines, errors = read_lines(path)
    except (OSError, ValueError) as unreadable:
        is_missing = isinstance(unreadable, FileNotFoundError)
        why = "there is no such file, seen from the working directory" if is_missing else unreadable
        warn_once(f"{config.LABELS}={path!r} is ignored: {why}")
        lines, errors = [], []
    for error in errors:
        warn_once(f"{config.LABELS}: {error}; it is ignored")
    _of_environment[path] = FunctionLabels(lines, is_strict=False, is_early=is_early)


def notes_of_environment() -> list[str]:
    """Notes for health reports: functions of the file that were not found yet."""
    return [
        f"not labelled, since not imported or defined yet: {', '.join(labels.waiting)} ({path})"
        for path, labels in _of_environment.items()
        if labels.waiting
    ]


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threads.RLock()


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)
