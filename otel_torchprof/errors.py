"""Exceptions of this package, warnings, and texts of messages that are safe to print."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import parsers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


def printable(text: str) -> str:
    r"""The text with every character that is not printable as its Python escape: ``\x1b``, ``\u202e``, ``\udc80``.

    That covers C0 and C1 controls, DEL, bidirectional overrides, line separators, invisible characters and lone surrogates, so
    that a name can neither move the cursor nor hide or reorder the text beside it. Costs 50 ns for a printable text.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Returns text like :func:`printable`, but keeps line feeds."""
    return "\n".join(map(printable, text.split("\n")))


_logger = logging.getLogger("otel_torchprof")

_P = ParamSpec("_P")
_T = TypeVar("_T")

_URL = r"(?s)//|@|:\d+[/?]|\?.*="
"""Matches a URL that may contain credentials, and no glob or list of names."""


class TorchProfError(RuntimeError):
    """Base class of the errors that this package raises on purpose.

    A RuntimeError, like the errors of torch's profiler.
    """


class NativeError(TorchProfError):
    """The native core refused a call."""

    status: int = 0
    """Error code of the core (``otp_status`` in ``recorder.h``)."""


class TorchLibraryError(TorchProfError):
    """The library that records torch operators could not be built or loaded; the message names the fix."""


class ExportError(TorchProfError):
    """Recorded data could not be written or sent; the recording itself is unchanged and can be exported again."""

    reason: str = ""
    """The transport's reason, with advice where there is some; header values are never included. Also part of the
    message."""


class MissingPackageError(TorchProfError, ImportError):
    """A package of one of the extras is not installed; the message names the extra."""


def package_of(extra: str, name: str, use: str) -> Any:
    """Imports and returns a package of an extra. Raises MissingPackageError, which begins with what needs it: ``use``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingPackageError(
            f"{use} needs {package}, which is not installed: pip install 'otel-torchprof[{extra}]'"
        ) from error


def checked(name: str, value: object, parse: Callable[[Any], _T]) -> _T:
    """Parses the value of a keyword argument.

    Raises:
        TypeError, ValueError: the value is not allowed; the message has its name, its value and the allowed values.
    """
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} is {displayed(value)}; {error}") from None


def displayed(value: object) -> str:
    """Formats a value for messages, without credentials of a URL."""
    return repr(without_credentials(value) if isinstance(value, str) and re.search(_URL, value) else value)


def without_credentials(url: str) -> str:
    """Returns the URL with ``***`` for user and password, and for the query.

    Works on the text and not on its parts, since it also has to hide credentials of a URL that cannot be parsed.
    """
    return re.sub(r"\?.+", "?***", re.sub(r"^((?:[\w+.-]+:)?//)?.*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)


def check_names(function: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raises TypeError for the name of an argument that a function does not have, with what may be meant."""
    for name in given:
        if name not in allowed:
            hint = " ".join(filter(None, (parsers.suggestion(name, allowed), f"allowed are {', '.join(allowed)}")))
            raise TypeError(f"{name} is no argument of {function}; {hint}")


on_forget: list[Callable[[], None]] = []
"""Functions that :func:`forget_warnings` calls."""


def once(function: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a function that warns: a call with the same arguments does nothing until :func:`forget_warnings`."""
    calls: dict[tuple[object, ...], object] = {}
    on_forget.append(calls.clear)

    @functools.wraps(function)
    def warn_unless_repeated(*arguments: _P.args, **named: _P.kwargs) -> None:
        own = object()
        if calls.setdefault((*arguments, *named.items()), own) is own:  # atomic: only one of two threads warns
            function(*arguments, **named)

    return warn_unless_repeated


@once
def warn_once(message: str) -> None:
    """Logs a warning, unless it was logged before."""
    _logger.warning("%s", message)


def forget_warnings() -> None:
    """Allows all warnings again."""
    for forget in on_forget:
        forget()


_PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest frame that is not of this package."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001 - the only way to the callers, and documented
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


@once
def warn_caller_once(text: str) -> None:
    """Warns like :func:`warn_caller`, but of each text only once."""
    warn_caller(text)
