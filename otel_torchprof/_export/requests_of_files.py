"""Pieces of files as requests of a size that receivers take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from otel_torchprof._encode.otlp import RECEIVERS_MAX_BYTES, message_size

from .otlp_wire import common_size, parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .otlp_reading import Piece


@dataclass(frozen=True)
class FileRequest:
    """A serialized request, and what of a file is in it."""

    body: bytes
    spans: int
    offset: int
    """Where the first piece in it begins."""
    end: int
    """Where the last one ends; of one that is sent in several requests, where it begins until the last of them."""


def requests_of(pieces: Iterable[Piece], max_bytes: int) -> Iterator[FileRequest]:
    """Small pieces together and large ones apart, in order. What ``pieces`` raises is raised once all before it went."""
    waiting: list[Piece] = []
    size = 0
    try:
        for piece in pieces:
            if not piece.spans:
                continue
            if waiting and size + len(piece.body) > max_bytes:
                yield _joined(waiting)
                waiting, size = [], 0
            if len(piece.body) > max_bytes:
                yield from split(_joined([piece]), _size(piece.body, max_bytes))
            else:
                waiting.append(piece)
                size += len(piece.body)
    except Exception:
        if waiting:
            yield _joined(waiting)
        raise
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[Piece]) -> FileRequest:
    """Messages end to end are one."""
    body = b"".join(piece.body for piece in pieces)
    return FileRequest(body, sum(piece.spans for piece in pieces), pieces[0].offset, pieces[-1].end)


def _size(body: bytes, max_bytes: int) -> int:
    common = common_size(body)
    # Whether a resource alone is too large is the receiver's to say: it may take more than others do.
    return message_size(max_bytes, common) if common < RECEIVERS_MAX_BYTES else len(body)


def split(request: FileRequest, max_bytes: int) -> Iterator[FileRequest]:
    """The same spans in requests of at most so many bytes; one that alone is larger goes alone."""
    last: FileRequest | None = None
    for body, spans in parts(request.body, max_bytes):
        if last is not None:
            yield last
        last = FileRequest(body, spans, request.offset, request.offset)
    if last is not None:
        yield replace(last, end=request.end)
