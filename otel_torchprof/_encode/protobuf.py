"""Protocol buffers: single fields, and columns of numbers as varints without a loop over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

Integers = npt.NDArray[np.int64]
_LENGTH_DELIMITED = 2
_LONGEST = 10
"""Bytes of the longest varint."""


def varint(number: int) -> bytes:
    """A number from 0 to 2**64 - 1."""
    parts = bytearray()
    while number >> 7:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def tag(field: int, wire_type: int = _LENGTH_DELIMITED) -> bytes:
    """What precedes the value of a field; by default of bytes, of a text or of a message."""
    return varint(field << 3 | wire_type)


def number(field: int, value: int) -> bytes:
    """A field with a number, negative ones as ``int64``."""
    return tag(field, 0) + varint(value % (1 << 64))


def message(field: int, *parts: bytes) -> bytes:
    """A field with bytes, a text or a message."""
    content = b"".join(parts)
    return tag(field) + varint(len(content)) + content


def varint_sizes(values: npt.NDArray[Any]) -> Integers:
    """Bytes of each integer as a varint; negative ones have ten."""
    numbers = values.astype(np.uint64)
    sizes = np.ones(numbers.shape, dtype=np.int64)
    for place in range(1, _LONGEST):
        is_longer = numbers >= np.uint64(1 << 7 * place)
        if not is_longer.any():
            break
        sizes += is_longer
    return sizes


def put_varints(room: npt.NDArray[np.uint8], places: Integers, values: npt.NDArray[Any], sizes: Integers) -> None:
    """Writes each integer at its place in ``room``; ``sizes`` are its :func:`varint_sizes`."""
    numbers = values.astype(np.uint64)
    for byte in range(int(sizes.max(initial=0))):
        chosen = sizes > byte
        part = (numbers[chosen] >> np.uint64(7 * byte)).astype(np.uint8) & np.uint8(0x7F)
        room[places[chosen] + byte] = part | (np.uint8(0x80) * (sizes[chosen] > byte + 1).astype(np.uint8))


def starts_of(sizes: Integers) -> Integers:
    """Where each of some pieces begins if they follow one another."""
    return np.cumsum(sizes) - sizes


def put_pieces(
    room: npt.NDArray[np.uint8], places: Integers, chosen: Integers, pieces: Iterable[bytes], sizes: Integers
) -> None:
    """Writes at each place one of a few pieces of bytes, ``chosen`` by its number; ``sizes`` are those of the pieces."""
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    lengths = sizes[chosen]
    within = np.arange(int(lengths.sum())) - np.repeat(starts_of(lengths), lengths)
    room[np.repeat(places, lengths) + within] = data[np.repeat(starts_of(sizes)[chosen], lengths) + within]
