"""The calls of a program as a profile function in Python sees them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


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
