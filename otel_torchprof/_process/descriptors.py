"""Descriptors of this package in programs that close all that they do not know, and reuse the numbers."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

_HIGH = 200


def moved_up(descriptor: int) -> int:
    """Moves a descriptor to a high number, which is hardly ever closed by others; returns it."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # the limit of the process is lower
        return descriptor
    os.close(descriptor)
    return moved


def identity(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of what is open under a number; None if nothing is. Before each use, they tell whether it is the same."""
    with suppress(OSError):
        info = os.fstat(descriptor)
        return info.st_dev, info.st_ino
    return None


class OwnDescriptor:
    """A descriptor of this package that is closed only while it is its own.

    Args:
        descriptor: is moved up.
    """

    def __init__(self, descriptor: int) -> None:
        self.number = moved_up(descriptor)
        self._identity = identity(self.number)

    @property
    def is_own(self) -> bool:
        """Whether nobody else has closed it."""
        return self._identity is not None and identity(self.number) == self._identity

    def close(self) -> None:
        """Closes it, if it is open and its own."""
        if self.is_own:
            os.close(self.number)
