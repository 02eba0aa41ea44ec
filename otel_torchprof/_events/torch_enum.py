"""Enumerations that torch has, as they are without torch."""

from __future__ import annotations

import enum


class TorchEnum(enum.IntEnum):
    """Has the values and the text of torch's enumeration of the same name.

    ``ours == torchs`` holds for the same value; ``torchs == ours`` does not, since torch's enumeration knows only itself.
    """

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ == type(self).__name__:
            return int(self) == int(other)  # type: ignore[call-overload, no-any-return]  # torch's converts to int too
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
