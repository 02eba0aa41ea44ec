"""Labels without a change of code: functions that a file or a list names are labelled where they are looked up."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._process.after_import import when_imported
from otel_torchprof._process.finders import is_there

from .label_lines import Found, Line, LineError, MissingError, find, read_lines
from .labels import is_labelled, record_function

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

_logger = logging.getLogger("otel_torchprof")


def label_functions(source: str | os.PathLike[str] | Iterable[str]) -> FunctionLabels:
    """Labels functions by name, as if each had ``record_function`` as its decorator, until the result's ``remove()``.

    Takes the path of a file, or a list of such lines: ``package.module:function`` or ``package.module:Class.method``, then,
    after a space, the name of the label if it is to be another than that; ``#`` begins a comment. A dot may stand for the
    colon. Functions, methods, static and class methods, generators, coroutines and async generators, and C functions of
    modules. What is in modules that are not imported yet is labelled when they are; nothing is imported.

    A function is labelled where it is looked up, in its module or class: who has taken it from there before, as
    ``from module import function`` does, calls the function without its label. What is labelled already is not labelled
    again. Thread-safe. A call costs what a label costs, also where nobody records.

    Raises:
        TypeError: neither a path nor a list of lines.
        OSError, UnicodeDecodeError: the file cannot be read.
        ValueError: a line that names no function, or none that there is in a module that is imported; nothing is labelled then.
            In modules that are imported later it is logged, once.
    """
    lines, errors = read_lines(source)
    if errors:
        raise errors[0]
    for line in lines:
        _check_that_module_exists(line)
    return FunctionLabels(lines, is_strict=True)


def _check_that_module_exists(line: Line) -> None:
    top = line.target.partition(":")[0].partition(".")[0]
    if not is_there(top):
        raise line.error(f"there is no module {top} on sys.path")


class FunctionLabels:
    """Functions that are labelled until :meth:`remove`; also a context manager. Thread-safe. See :func:`label_functions`."""

    def __init__(self, lines: Iterable[Line], *, is_strict: bool, is_early: bool = False) -> None:
        self._is_early = is_early
        self._undefined: dict[Line, tuple[str, ...]] = {}
        self._errors: list[LineError] | None = [] if is_strict else None
        self._waits: set[Line] = set()
        self._calls: list[Callable[[], None]] = []
        self._entries: dict[Line, _Entry] = {}
        self._removed = False
        for line in lines:
            self._add(line)
        errors, self._errors = self._errors, None  # from here on nobody is there to whom they could be raised
        if errors:
            self.remove()
            raise errors[0]

    @property
    def labelled(self) -> tuple[str, ...]:
        """The functions that are labelled, as they were written."""
        with _lock:
            return tuple(line.target for line in self._entries)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Those whose modules are not imported yet, and of a script that has just begun those that it has not defined yet."""
        with _lock:
            return tuple(sorted(line.target for line in self._waits))

    def look_again(self, *, is_early: bool) -> None:
        """Labels what the script has defined since; unless it is early, what is missing still is warned of, and given up."""
        if self._undefined:
            with _lock:
                self._is_early = is_early
                undefined, self._undefined = self._undefined, {}
            for line, path in undefined.items():
                self._on_module(line, path, sys.modules["__main__"])

    def remove(self) -> tuple[str, ...]:
        """Puts every function back in its place, and waits for no more modules; again without effect.

        Returns those that stay labelled: where another tool has put something in the place of the label, that is left alone,
        with the label inside.
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

    def _add(self, line: Line) -> None:
        # Without the lock: a module that another thread is importing is waited for.
        self._waits.add(line)
        for module, path in line.splits():
            self._calls.append(when_imported(module, functools.partial(self._on_module, line, path)))

    def _on_module(self, line: Line, path: tuple[str, ...], module: types.ModuleType) -> None:
        try:
            with _lock:
                if not self._removed and line not in self._entries:
                    found = find(line, module, path)
                    if found is not None:
                        self._label(line, found)
        except LineError as error:
            if self._is_early and module.__name__ == "__main__" and isinstance(error, MissingError):
                self._undefined[line] = path
            else:
                self._note(line, error)
        except Exception as error:  # noqa: BLE001 - a class may refuse to be changed with whatever it likes
            self._note(line, line.error(f"{module.__name__} does not let it be replaced: {error!r}"))

    def _label(self, line: Line, found: Found) -> None:
        key = id(found.owner), found.name
        entry = _entries.get(key)
        if entry is not None and entry.is_there():
            if entry.line.label != line.label:
                raise line.error(f"it is labelled {entry.line.label!r} already, by {entry.line.place}")
        elif is_labelled(_function_of(found.raw)):
            self._waits.discard(line)
            return
        else:
            entry = _entries[key] = _Entry(line, found)
        entry.users.add(self)
        self._entries[line] = entry
        self._waits.discard(line)

    def _note(self, line: Line, error: LineError) -> None:
        with _lock:
            self._waits.discard(line)
        if self._errors is not None:
            self._errors.append(error)
        else:
            config.warn_once(f"{error}; it is ignored")


class _Entry:
    """A function that is labelled, and for whom. Used under the lock."""

    def __init__(self, line: Line, found: Found) -> None:
        self.line = line
        self.users: set[FunctionLabels] = set()
        self._found = found
        function = _function_of(found.raw)
        labelled: Any = record_function(line.label)(function)
        self._label = labelled if function is found.raw else type(found.raw)(labelled)
        setattr(found.owner, found.name, self._label)

    def is_there(self) -> bool:
        """Whether the label stands where it was put."""
        return vars(self._found.owner).get(self._found.name) is self._label

    def leave(self, user: FunctionLabels) -> bool:
        """Takes the label away with its last user; False where it cannot be."""
        self.users.discard(user)
        if self.users:
            return True
        owner, name, raw, is_own = self._found
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


_entries: dict[tuple[int, str], _Entry] = {}
"""By owner, which the entry keeps alive, and name."""
_lock = threading.RLock()


# ---- the file that the environment names ----


_of_environment: dict[str, FunctionLabels] = {}
"""By file, of which there is one unless the program changes its environment."""


def label_by_environment(*, is_early: bool = False) -> None:
    """Labels what the file of ``OTEL_TORCHPROF_LABELS`` lists, once in a process, for good; raises nothing.

    ``is_early``: the script may not have defined its functions yet; they are looked for again with every call, until one is not.
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
        config.warn_once(f"{config.LABELS}={path!r} is ignored: {why}")
        lines, errors = [], []
    for error in errors:
        config.warn_once(f"{config.LABELS}: {error}; it is ignored")
    _of_environment[path] = FunctionLabels(lines, is_strict=False, is_early=is_early)


def notes_of_environment() -> list[str]:
    """What a reader should know: of functions that a file lists and that have not been seen yet."""
    return [
        f"not labelled, since not imported or defined yet: {', '.join(labels.waiting)} ({path})"
        for path, labels in _of_environment.items()
        if labels.waiting
    ]


def _in_child() -> None:
    global _lock  # noqa: PLW0603 - whoever held it is not in this process
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
