"""What a script may take away from the interpreter and our own code needs, put back while our code runs at the end."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MISSING: Any = object()
_STANDARD = 2
"""The last of the descriptors of stdin, stdout and stderr."""


class InterpreterState:
    """Modules, builtins and the attributes of ``sys`` and ``os`` at one moment."""

    def __init__(self) -> None:
        self._sys = vars(sys)
        self._kept = [(kept, dict(kept)) for kept in (sys.modules, vars(builtins), self._sys, vars(os))]

    @contextlib.contextmanager
    def restored(self, **attributes: Any) -> Iterator[None]:
        """As they were, and attributes of ``sys`` as given; afterwards what was changed is as the script left it.

        What is opened meanwhile gets no descriptor of a standard stream that the script closed: text that waits in the
        stream's buffer would go there when Python ends.
        """
        changes = [(kept, {**saved, **(attributes if kept is self._sys else {})}) for kept, saved in self._kept]
        undo: list[tuple[dict[str, Any], str, Any]] = []
        taken: list[int] = []
        try:
            for kept, requested in changes:
                for name, value in requested.items():
                    if (found := kept.get(name, _MISSING)) is not value:
                        kept[name] = value
                        undo.append((kept, name, found))
            taken = _take_standard_descriptors()
            yield
        finally:
            for fd in taken:
                os.close(fd)
            for kept, name, found in reversed(undo):
                if found is _MISSING:
                    kept.pop(name, None)
                else:
                    kept[name] = found


def _take_standard_descriptors() -> list[int]:
    """Opens those that are closed."""
    taken: list[int] = []
    with contextlib.suppress(OSError):  # no more descriptors: then none will be opened either
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STANDARD:
            taken.append(fd)
        os.close(fd)
    return taken
