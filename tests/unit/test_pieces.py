"""The buffer that encoders write through, one after the other."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from otel_torchprof._native import encoders as module
from otel_torchprof._native.encoders import pieces
from otel_torchprof._native.loops import pointer


@pytest.fixture(autouse=True)
def _no_spare(monkeypatch):
    monkeypatch.setattr(module, "_spare", [])


def writing(text, buffers):
    """Writes the text for each item, and notes the buffer that it was given."""
    data, ends = np.frombuffer(text, np.uint8), np.array([len(text)], np.uint64)
    names = module.ffi.new("otp_names *", {"data": pointer(data), "ends": pointer(ends), "count": 1})

    def write(item, buffer, _alive=(data, ends)):
        buffers.append(buffer)
        assert module.lib.otp_json_escape_names(names, buffer, pointer(ends.copy())) == 0
        return item + 1

    return write


def taken(encoded):
    return [(bytes(piece), count) for piece, count in encoded]


def test_next_one_writes_into_the_same_buffer():
    """All pieces, and those of whoever comes next, go through one buffer."""
    first, second = [], []
    assert taken(pieces(writing(b"one", first), range(2, 4))) == [(b"one", 1), (b"one", 1)]
    assert taken(pieces(writing(b"2", second), range(1))) == [(b"2", 1)]
    assert {id(buffer) for buffer in first + second} == {id(first[0])}


def test_two_at_a_time_have_a_buffer_each():
    """Two that write in turns do not write over each other."""
    buffers = []
    one, other = pieces(writing(b"one", buffers), range(2)), pieces(writing(b"2", buffers), range(2))
    assert taken(next(each) for each in (one, other, one, other)) == [(b"one", 1), (b"2", 1)] * 2
    assert buffers[0] is buffers[2] is not buffers[1]


def test_piece_is_released_with_the_next():
    """A piece that is kept for too long raises an error instead of showing what was written over it."""
    encoded = pieces(writing(b"one", []), range(2))
    first, _ = next(encoded)
    assert bytes(next(encoded)[0]) == b"one"
    with pytest.raises(ValueError, match="released"):
        bytes(first)


def test_large_buffer_is_not_kept():
    """What grew beyond usual messages is freed."""
    list(pieces(writing(b"x" * module._LARGEST_SPARE, []), range(1)))
    assert module._spare == []


def test_reader_that_stops_early_leaves_nothing():
    """The buffer of a reader that does not come to the end is freed with it."""
    assert taken(islice(pieces(writing(b"one", []), range(9)), 2)) == [(b"one", 1)] * 2
    assert module._spare == []


def test_no_memory():
    """Where an encoder has none left, the error says what to do."""
    with pytest.raises(MemoryError, match="encode fewer events at a time"):
        list(pieces(lambda _item, _buffer: -1, range(1)))
