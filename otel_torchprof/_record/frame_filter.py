"""``FrameFilter``: which Python calls a profile records: ``profile(with_stack=True, frames=FrameFilter(...))``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config, parsers
from otel_torchprof.errors import checked

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable

_OPTIONS = config.fields_in(config.FRAMES)


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

    include: Iterable[str] = config.INCLUDE.fallback
    exclude: Iterable[str] = config.EXCLUDE.fallback
    max_depth: int | None = config.MAX_DEPTH.fallback
    min_duration: float = config.MIN_DURATION.fallback
    c_functions: bool = config.C_FUNCTIONS.fallback
    modules_only: bool = config.MODULES_ONLY.fallback
    _included: _Entries | None = field(init=False, repr=False, compare=False)
    _excluded: _Entries | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, option in _OPTIONS.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), option.check))
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
        arguments: dict[str, Any] = {name: option.read() for name, option in _OPTIONS.items()}
        return cls(**arguments)


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
        paths = [_path_expression(entry) for entry in entries if parsers.is_path(entry)]
        if not modules and not paths:
            return None
        return cls(_any_of(modules, r"(\..*)?"), _any_of(paths, "(/.*)?"))

    def have(self, path: str, module_name: str | None) -> bool:
        """Whether an entry matches."""
        if self.modules is not None and module_name is not None and self.modules.fullmatch(module_name):
            return True
        return self.paths is not None and self.paths.fullmatch(path) is not None


def _as_expression(entry: str) -> str:
    return ".*".join(map(re.escape, entry.split("*")))


def _path_expression(entry: str) -> str:
    path = os.path.expanduser(entry)  # noqa: PTH111 - Path raises where there is no home
    anywhere = "" if path.startswith("/") else "(.*/)?"
    return anywhere + _as_expression(path.removeprefix("./").rstrip("/"))


def _any_of(expressions: list[str], within: str) -> re.Pattern[str] | None:
    return re.compile(f"({'|'.join(expressions)}){within}", re.DOTALL) if expressions else None


ALL_FRAMES = FrameFilter()
"""Selects all calls."""
