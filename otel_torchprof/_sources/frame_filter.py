"""Which of Python's calls a profile records: ``profile(with_stack=True, frames=FrameFilter(...))``."""

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
    """Which calls are recorded; what is left out costs next to nothing while the profile runs.

    Entries of ``include`` and ``exclude`` are names of modules, each of which stands for what is in it too (``torch.nn``), or
    paths and globs: whatever has a ``/`` or a ``*``, or ends in ``.py``. A path stands for a file or for all in a folder, and
    where it does not begin with ``/`` it may begin at any folder; ``*`` stands for any characters, ``/`` too. A glob without
    ``/`` is held against module names as well. A call is recorded when ``include`` is empty or has it, and ``exclude`` has it
    not; what it calls is judged by itself, and hangs under the nearest call around it that is recorded. Calls of
    ``torch.nn.Module`` objects and steps of optimizers are not judged: they are there whatever the two say.

    Immutable, hence safe to share between threads, profiles and processes.

    Args:
        include: record these functions only.
        exclude: but not these.
        max_depth: how many recorded calls may be open around each other on a thread, at least 1, not counting those that were
            open at the start; None: any number.
        min_duration: seconds; shorter calls are taken out when the recording is read. They still cost their recording.
        c_functions: False: no C functions. Those that are recorded go with the function that calls them.
        modules_only: nothing but the calls of ``torch.nn.Module`` objects and the steps of optimizers.

    Raises:
        TypeError, ValueError: a bad argument; names it, its value and what is allowed.
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
        """Whether :meth:`decide` may answer False."""
        return self._included is not None or self._excluded is not None

    def decide(self, code: types.CodeType, module_name: str | None) -> bool:
        """Whether calls of a function are recorded, by ``include`` and ``exclude`` alone. Some microseconds; pure.

        Args:
            code: of the function.
            module_name: that it was defined in (``__name__`` of its globals); None where that is not known.
        """
        if not self.judges_code:
            return True
        path = code.co_filename
        if not path.startswith("<"):
            path = os.path.abspath(path)  # noqa: PTH100 - must not resolve: the name is what people know it by
        if self._included is not None and not self._included.have(path, module_name):
            return False
        return self._excluded is None or not self._excluded.have(path, module_name)

    @classmethod
    def from_environment(cls) -> FrameFilter:
        """As ``OTEL_TORCHPROF_FRAMES`` says; what is bad in it is warned of once and ignored."""
        found: dict[str, Any] = {}
        for name, (setting, parse) in _SETTINGS.items():

            def checked(text: str, name: str = name, parse: Callable[[str], Any] = parse) -> Any:
                return getattr(cls(**{name: parse(text)}), name)

            value = setting._replace(parse=checked).read()
            if value is not None:
                found[name] = value
        return cls(**found)


def checked_filter(given: FrameFilter | None) -> FrameFilter:
    """The filter that was given, else the environment's.

    Raises:
        TypeError: it is none.
    """
    if given is None:
        return FrameFilter.from_environment()
    if not isinstance(given, FrameFilter):
        options = ", ".join(f"{option.name}=" for option in fields(FrameFilter) if option.init)
        raise TypeError(f"frames is {given!r}; it must be a FrameFilter({options}), or None")
    return given


class _Entries(NamedTuple):
    """What ``include`` or ``exclude`` has, as one expression each."""

    modules: re.Pattern[str] | None
    paths: re.Pattern[str] | None

    @classmethod
    def of(cls, entries: Iterable[str]) -> _Entries | None:
        """None where there are none."""
        modules = [_as_expression(entry) for entry in entries if "/" not in entry and not entry.endswith(".py")]
        paths = [_path_expression(entry) for entry in entries if _is_path(entry)]
        if not modules and not paths:
            return None
        return cls(_any_of(modules, r"(\..*)?"), _any_of(paths, "(/.*)?"))

    def have(self, path: str, module_name: str | None) -> bool:
        """Whether one of them fits."""
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
"""How each is read from the environment."""

ALL_FRAMES = FrameFilter()
"""Leaves nothing out."""
