"""The calls of a program as Python's own tools see them: in a tree by sys.setprofile, in sums by cProfile."""

from __future__ import annotations

import collections
import cProfile
import inspect
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

_GOES_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def tree_by_setprofile(program: Callable[[], object]) -> list[tuple[int, str]]:
    """Every call inside a program: how many are around it there, and its name as a recording has it without the path."""
    found: list[tuple[int, str]] = []
    depth = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if event in ("call", "c_call"):
            found.append((depth, f"({frame.f_lineno}): {frame.f_code.co_name}" if event == "call" else repr(argument)))
            depth += 1
        else:
            depth -= 1

    sys.setprofile(profile)
    try:
        program()
    finally:
        sys.setprofile(None)
    # Whether the return from setprofile is told of depends on what the process has traced before.
    first = f"({program.__code__.co_firstlineno}): {program.__name__}"
    start, base = next((at, depth) for at, (depth, name) in enumerate(found) if name == first)
    end = next(at for at, (depth, _) in enumerate([*found[start + 1 :], (base, "")]) if depth <= base)
    return [(depth - base, without_address(name)) for depth, name in found[start + 1 : start + 1 + end]]


def without_address(name: str) -> str:
    """A name without what is another in each run."""
    return re.sub(r" at 0x[0-9a-f]+", "", name)


Function = tuple[str, int, str]
"""File without directories, line, name. The line of what goes on where it stopped is 0, and file and line of C functions."""


@dataclass(frozen=True)
class Sums:
    """How often functions were called, and by which."""

    calls: collections.Counter[Function]
    edges: collections.Counter[tuple[Function, Function]]


def sums_by_cprofile(program: Callable[[], object]) -> tuple[Sums, set[tuple[str, str]]]:
    """What cProfile counts, and the files and names of what goes on where it stopped."""
    profiler = cProfile.Profile()
    profiler.runcall(program)
    stats = profiler.getstats()
    going_on = {_place(entry.code)[::2] for entry in stats if _goes_on(entry.code)}
    calls = collections.Counter[Function]()
    edges = collections.Counter[tuple[Function, Function]]()
    for entry in stats:
        calls[_place(entry.code)] += entry.callcount
        for inner in entry.calls or ():
            edges[_place(entry.code), _place(inner.code)] += inner.callcount
    del calls["", 0, "disable"]  # its own
    return Sums(calls, edges), going_on


def _goes_on(code: CodeType | str) -> bool:
    return not isinstance(code, str) and code.co_flags & _GOES_ON != 0


def _place(code: CodeType | str) -> Function:
    if isinstance(code, str):
        # <method 'append' of 'list' objects>, <built-in method builtins.len>, <built-in method from_bytes>
        return "", 0, re.sub(r"^<(method|built-in method) |( of .*)?>$", "", code).strip("'").rpartition(".")[2]
    return _file(code.co_filename), 0 if _goes_on(code) else code.co_firstlineno, code.co_name


def _file(path: str) -> str:
    return path.rpartition("/")[2]


def sums_of(names: Iterable[str], parents: list[int], start: str, going_on: set[tuple[str, str]]) -> Sums:
    """The same of rows: names, and the row around each, of the call whose name ends with `start` and all inside."""
    calls = collections.Counter[Function]()
    edges = collections.Counter[tuple[Function, Function]]()
    inside: dict[int, Function] = {}
    for row, (name, parent) in enumerate(zip(names, parents, strict=True)):
        if parent not in inside and not name.endswith(start):
            continue
        inside[row] = _function(name, going_on)
        calls[inside[row]] += 1
        if parent in inside:
            edges[inside[parent], inside[row]] += 1
    return Sums(calls, edges)


def _function(name: str, going_on: set[tuple[str, str]]) -> Function:
    match = re.fullmatch(r"(.*)\((\d+)\): (.*)", name)
    if match is None:
        return "", 0, re.sub(r"^<built-in (function|method) |( of .*)?>$", "", name)
    file = _file(match[1])
    line = max(int(match[2]), 1)  # where a module's code is entered no line is before the first, and has the number 0
    return file, 0 if (file, match[3]) in going_on else line, match[3]
