"""What happens to blocks of memory over time, in torch's terms."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .memory_blocks import device_number

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = npt.NDArray[Any]


class Category(enum.IntEnum):
    """What memory is used for: torch's names, with its numbers in files."""

    PARAMETER = 0
    OPTIMIZER_STATE = 1
    INPUT = 2
    TEMPORARY = 3
    ACTIVATION = 4
    GRADIENT = 5
    AUTOGRAD_DETAIL = 6
    UNKNOWN = 7


class Action(enum.IntEnum):
    """What happened to a block: the values of torch's ``Action``."""

    PREEXISTING = 1
    CREATE = 2
    INCREMENT_VERSION = 3
    DESTROY = 4


class Changes(NamedTuple):
    """What happened to blocks, in order of time and then of action."""

    time: npt.NDArray[np.int64]
    """Unix ns; -1 for what was there before."""
    action: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    """Size of the block."""
    category: npt.NDArray[np.int64]
    """What it is used for, or was until now."""
    later: npt.NDArray[np.int64]
    """What it is used for from now on."""
    device: npt.NDArray[np.int64]
    """See :func:`~.memory_blocks.device_number`."""

    def chosen(self, which: Array) -> Changes:
        """Those of a mask, or of these places."""
        return Changes(*(column[which] for column in self))

    def in_time(self) -> Changes:
        """In their order."""
        return self.chosen(np.lexsort((self.action, self.time)))


def changes_of_unknown(memory: Mapping[str, Array]) -> Changes:
    """What the allocator reported of blocks that no tensor was seen in, as torch has it; unordered.

    A block is known by its address: allocated where one lives already, it is the next version of that; freed where
    none lives, it was there before.
    """
    in_time = np.argsort(memory["time"], kind="stable")
    device = device_number(memory["device_type"].astype(np.int64), memory["device_index"].astype(np.int64))[in_time]
    size, time, address = (memory[name][in_time] for name in ("bytes", "time", "address"))
    by_block = np.lexsort((address, device))
    lives = np.zeros(len(size), dtype=bool)
    same = address[by_block[1:]] == address[by_block[:-1]]
    same &= device[by_block[1:]] == device[by_block[:-1]]
    lives[by_block[1:]] = same & (size[by_block][:-1] > 0)
    before = (size <= 0) & ~lives
    action = np.where(size > 0, np.where(lives, Action.INCREMENT_VERSION, Action.CREATE), Action.DESTROY)
    count = int(before.sum())
    unknown = np.full(len(size) + count, Category.UNKNOWN, dtype=np.int64)
    return Changes(
        np.concatenate((np.full(count, -1), time)),
        np.concatenate((np.full(count, Action.PREEXISTING), action)),
        np.abs(np.concatenate((size[before], size))),
        unknown,
        unknown,
        np.concatenate((device[before], device)),
    )
