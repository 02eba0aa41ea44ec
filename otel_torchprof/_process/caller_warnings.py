"""Warnings that point at the line of the user, however deep in this package they arise."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest frame that is not of this package."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 - the only way to the callers, and documented
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_caller_once(text: str) -> None:
    """As :func:`warn_caller`, the first time that this text comes."""
    if text not in _said:
        _said.add(text)
        warn_caller(text)


_said: set[str] = set()
