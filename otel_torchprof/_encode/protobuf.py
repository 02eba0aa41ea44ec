"""Protocol buffers: single fields, and columns of numbers as varints without a loop over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Integers = npt.NDArray[np.int64]
LENGTH_DELIMITED = 2
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


def tag(field: int, wire_type: int = LENGTH_DELIMITED) -> bytes:
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


class TextTable:
    """Different texts by number, the empty one first. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def number(self, text: str) -> int:
        """Number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    def encoded(self) -> Iterator[bytes]:
        """Yields the texts as UTF-8; what has no UTF-8 is replaced."""
        return (text.encode("utf-8", "replace") for text in self._numbers)


class Varints(NamedTuple):
    """A field of many messages: numbers in each."""

    field: int
    values: Integers
    """Of all messages, one after another."""
    counts: Integers | None = None
    """Number of values of each message, which are a packed list; None: a single number in each."""

    @classmethod
    def of_rows(cls, field: int, rows: Integers) -> Varints:
        """A list for each row of numbers."""
        return cls(field, rows.reshape(-1), np.full(len(rows), rows.shape[1]))


def messages(
    field: int, columns: Sequence[Varints], pieces: Sequence[bytes] = (), chosen: Integers | None = None
) -> bytes:
    """Many messages in a field: each with some numbers, then one of a few pieces of bytes, ``chosen`` by its number."""
    piece_sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
    sizes = [varint_sizes(column.values) for column in columns]
    lengths = [
        of_values if column.counts is None else _sums(of_values, column.counts)
        for of_values, column in zip(sizes, columns, strict=True)
    ]
    content: Integers = np.zeros(len(lengths[0]), np.int64) if chosen is None else piece_sizes[chosen]
    for column, length in zip(columns, lengths, strict=True):
        content = content + 1 + length + (0 if column.counts is None else varint_sizes(length))
    header = varint_sizes(content) + 1
    begin = starts_of(content + header)
    room = np.empty(int((content + header).sum()), dtype=np.uint8)
    room[begin] = tag(field)[0]
    put_varints(room, begin + 1, content, header - 1)
    at = begin + header
    for column, of_values, length in zip(columns, sizes, lengths, strict=True):
        room[at] = tag(column.field, 0 if column.counts is None else LENGTH_DELIMITED)[0]
        at = at + 1
        places = at
        if column.counts is not None:
            width = varint_sizes(length)
            put_varints(room, at, length, width)
            at = at + width
            before = starts_of(of_values) - np.repeat(starts_of(length), column.counts)
            places = np.repeat(at, column.counts) + before
        put_varints(room, places, column.values, of_values)
        at = at + length
    if chosen is not None:
        _put_pieces(room, at, chosen, pieces, piece_sizes)
    return room.tobytes()


def _sums(sizes: Integers, counts: Integers) -> Integers:
    """The sum of as many sizes as each count says, one after another."""
    totals: Integers = np.append(0, np.cumsum(sizes))
    ends = np.cumsum(counts)
    sums: Integers = totals[ends] - totals[ends - counts]
    return sums


def _put_pieces(
    room: npt.NDArray[np.uint8], places: Integers, chosen: Integers, pieces: Iterable[bytes], sizes: Integers
) -> None:
    """Writes at each place one of a few pieces of bytes, ``chosen`` by its number; ``sizes`` are those of the pieces."""
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    lengths = sizes[chosen]
    within = np.arange(int(lengths.sum())) - np.repeat(starts_of(lengths), lengths)
    room[np.repeat(places, lengths) + within] = data[np.repeat(starts_of(sizes)[chosen], lengths) + within]
