"""``FrameFilter``: which Python calls a profile records: ``profile(with_stack=True, frames=FrameFilter(...))``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config, parsers

if TYPE_CHECKING:
    import types

_ENTRIES = "module names (torch.nn), and paths or globs, which have a / or a * (src/model.py, */site-packages/*)"


@dataclass(frozen=True)
class FrameFilter:
    """Selects the Python calls to record. Calls that are not selected cost next to nothing.

    Entries of ``include`` and ``exclude`` are module names, which include submodules (``torch.nn``), or paths and
    globs: entries with a ``/`` or a ``*``, or that end in ``.py``. A path selects a file or everything in a folder;
    without a leading ``/`` it may begin at any folder. ``*`` matches any characters, including ``/``. A glob without
    ``/`` is also matched against module names. A call is recorded if ``include`` is empty or matches it, and
    ``exclude`` does not match it. Its callees are matched on their own, and become children of the nearest recorded
    call. Calls of ``torch.nn.Module`` objects and optimizer steps are always recorded.

    Immutable, so threads, profiles and processes may share it.

    Args:
        include: functions to record. Default: all.
        exclude: functions not to record. Default: none.
        max_depth: limit of nested recorded calls per thread, at least 1, not counting calls that were open at the
            start. Default: None, no limit.
        min_duration: seconds; shorter calls are removed when the recording is read, but their recording still costs
            time. Default: 0.
        c_functions: whether to record C functions, which follow the selection of their caller. Default: True.
        modules_only: whether to record only calls of ``torch.nn.Module`` objects and optimizer steps. Default: False.

    Raises:
        TypeError, ValueError: a bad argument; the message has its name, its value and the allowed values.

    Examples:
        >>> import json
        >>> only = otp.FrameFilter(include=["json"], c_functions=False)
        >>> only.decide(json.dumps.__code__, "json")
        True
        >>> with otp.profile(with_stack=True, frames=only) as prof:
        ...     text = json.dumps([1])
    """

    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    max_depth: int | None = None
    min_duration: float = 0.0
    c_functions: bool = True
    modules_only: bool = False
    _included: _Entries | None = field(init=False, repr=False, compare=False)
    _excluded: _Entries | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _checked_entries(name, getattr(self, name)))
        _check_depth(self.max_depth)
        _check_duration(self.min_duration)
        for name in ("c_functions", "modules_only"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        object.__setattr__(self, "_included", _Entries.of(self.include))
        object.__setattr__(self, "_excluded", _Entries.of(self.exclude))

    @property
    def judges_code(self) -> bool:
        """Whether :meth:`decide` can return False."""
        return self._included is not None or self._excluded is not None

    def decide(self, code: types.CodeType, module_name: str | None) -> bool:
        """Whether calls of a function are recorded according to ``include`` and ``exclude``.

        Pure; costs some microseconds.

        Args:
            code: code object of the function.
            module_name: its module (``__name__`` of its globals); None if unknown.
        """
        if not self.judges_code:
            return True
        path = code.co_filename
        if not path.startswith("<"):
            path = os.path.abspath(path)  # noqa: PTH100 - must not resolve: users know the path by this name
        if self._included is not None and not self._included.have(path, module_name):
            return False
        return self._excluded is None or not self._excluded.have(path, module_name)

    @classmethod
    def from_environment(cls) -> FrameFilter:
        """Returns the filter in ``OTEL_TORCHPROF_FRAMES``; bad parts of it are ignored, with one warning each."""
        found: dict[str, Any] = {}
        for name, (setting, parse) in _SETTINGS.items():

            def checked(text: str, name: str = name, parse: Callable[[str], Any] = parse) -> Any:
                return getattr(cls(**{name: parse(text)}), name)

            value = setting._replace(parse=checked).read()
            if value is not None:
                found[name] = value
        return cls(**found)


def checked_filter(given: FrameFilter | None) -> FrameFilter:
    """Returns the given filter, else the environment's.

    Raises:
        TypeError: ``given`` is not a FrameFilter.
    """
    if given is None:
        return FrameFilter.from_environment()
    if not isinstance(given, FrameFilter):
        options = ", ".join(f"{option.name}=" for option in fields(FrameFilter) if option.init)
        raise TypeError(f"frames is {given!r}; it must be a FrameFilter({options}), or None")
    return given


class _Entries(NamedTuple):
    """The entries of ``include`` or ``exclude`` as one expression for modules and one for paths."""

    modules: re.Pattern[str] | None
    paths: re.Pattern[str] | None

    @classmethod
    def of(cls, entries: Iterable[str]) -> _Entries | None:
        """Compiles entries; None if there are none."""
        modules = [_as_expression(entry) for entry in entries if "/" not in entry and not entry.endswith(".py")]
        paths = [_path_expression(entry) for entry in entries if _is_path(entry)]
        if not modules and not paths:
            return None
        return cls(_any_of(modules, r"(\..*)?"), _any_of(paths, "(/.*)?"))

    def have(self, path: str, module_name: str | None) -> bool:
        """Whether an entry matches."""
        if self.modules is not None and module_name is not None and self.modules.fullmatch(module_name):
            return True
        return self.paths is not None and self.paths.fullmatch(path) is not None


def _is_path(entry: str) -> bool:
    return "/" in entry or "*" in entry or entry.endswith(".py")


def _as_expression(entry: str) -> str:
    return ".*".join(map(re.escape, entry.split("*")))


def _path_expression(entry: str) -> str:
    path = os.path.expanduser(entry)  # noqa: PTH111 - Path raises where there is no home
    anywhere = "" if path.startswith("/") else "(.*/)?"
    return anywhere + _as_expression(path.removeprefix("./").rstrip("/"))


def _any_of(expressions: list[str], within: str) -> re.Pattern[str] | None:
    return re.compile(f"({'|'.join(expressions)}){within}", re.DOTALL) if expressions else None


def _checked_entries(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is {given!r}; it must be a list of {_ENTRIES}")
    entries = tuple(given)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"{name} has {entry!r}; it must be a list of {_ENTRIES}")
        if not (_is_path(entry) or all(part.isidentifier() for part in entry.split("."))) or not entry.strip("/. "):
            raise ValueError(f"{name} has {entry!r}; allowed are {_ENTRIES}")
    return entries


def _check_depth(given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"max_depth is {given!r}; it must be a whole number of calls, or None")
    if not 1 <= given < 1 << 31:
        raise ValueError(f"max_depth is {given}; it must be at least 1 and below 2**31, or None")


def _check_duration(given: Any) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(f"min_duration is {given!r}; it must be a number of seconds")
    if not (math.isfinite(given) and given >= 0):
        raise ValueError(f"min_duration is {given!r}; it must be a number of seconds, 0 or more")


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("allowed is a whole number of calls, 1 or more") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("allowed is a number of seconds, 0 or more") from None


_SETTINGS: dict[str, tuple[config.Setting, Callable[[str], Any]]] = {
    "include": (config.INCLUDE, _entries),
    "exclude": (config.EXCLUDE, _entries),
    "max_depth": (config.MAX_DEPTH, _whole),
    "min_duration": (config.MIN_DURATION, _seconds),
    "c_functions": (config.C_FUNCTIONS, parsers.switch),
    "modules_only": (config.MODULES_ONLY, parsers.switch),
}
"""Settings and parsers for the environment, by argument."""

ALL_FRAMES = FrameFilter()
"""Selects all calls."""
