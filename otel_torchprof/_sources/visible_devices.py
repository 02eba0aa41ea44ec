"""Which GPUs CUDA shows to this process: what ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` mean.

Source: NVIDIA's "CUDA Programming Guide", environment variables, and what torch makes of the same variables where the guide is
silent (a GPU named twice: none is visible).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .nvml import Gpu

_UNKNOWN_ORDER = (
    "CUDA_VISIBLE_DEVICES names GPUs by number, and CUDA counts unlike ones by speed, which NVML cannot tell: "
    "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
)


@dataclass(frozen=True)
class Visible:
    """What CUDA shows."""

    gpus: tuple[Gpu, ...]
    """Cards, or one MIG device."""
    reason: str = ""
    """Why they are not all that there are, if so."""
    ordered: bool = True
    """Whether they stand in CUDA's order, so that a device's number in torch is its place here."""


def visible(cards: Sequence[Gpu], text: str | None, order: str | None) -> Visible:
    """The GPUs that a process with such variables can use.

    Args:
        cards: all there are, in the order of the PCI bus.
        text: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        order: ``CUDA_DEVICE_ORDER``.
    """
    by_speed = order != "PCI_BUS_ID" and len({card.model for card in cards}) > 1
    if text is None:
        return Visible(tuple(cards), ordered=not by_speed)
    if text.startswith("GPU-"):
        return _devices_named(text, lambda entry: _by_prefix(entry, "GPU-", cards))
    if text.startswith("MIG-"):
        instances = [instance for card in cards for instance in card.instances]
        found = _devices_named(text, lambda entry: _by_prefix(entry, "MIG-", instances))
        return Visible(found.gpus[:1], found.reason)  # CUDA shows a process one MIG device, the first
    if by_speed and text.strip():
        return Visible((), _UNKNOWN_ORDER)
    return _devices_named(text, lambda entry: _by_number(entry, cards))


def _devices_named(text: str, find: Callable[[str], Gpu | None]) -> Visible:
    """What a list names, up to the first entry that names nothing."""
    found: list[Gpu] = []
    for entry in text.split(","):
        gpu = find(entry)
        if gpu is None:
            break
        if gpu in found:
            return Visible((), f"CUDA_VISIBLE_DEVICES={text!r} names a GPU twice: CUDA then shows none")
        found.append(gpu)
    return Visible(tuple(found), f"CUDA_VISIBLE_DEVICES={text!r} shows no {'other ' if found else ''}GPU")


def _by_prefix(entry: str, kind: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The one GPU whose UUID begins so; a MIG device may also be named by its place."""
    named = [gpu for gpu in gpus if gpu.uuid.startswith(entry) or gpu.place == entry]
    return named[0] if entry.startswith(kind) and len(named) == 1 else None


def _by_number(entry: str, cards: Sequence[Gpu]) -> Gpu | None:
    """The card of this number; like CUDA, letters after the digits are overlooked."""
    digits = re.match(r"\s*\+?(\d+)", entry)
    return cards[int(digits[1])] if digits and int(digits[1]) < len(cards) else None
