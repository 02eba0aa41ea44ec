"""Trace files with faults in them, and what reading them must be like whatever they hold.

Everything follows from the number of an input, so that one can be had again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import random
import re
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_torchprof._cli import main as cli
from otel_torchprof._cli import send as send_command
from otel_torchprof._cli import show as show_command
from otel_torchprof._encode import otlp_json
from otel_torchprof._export.response import Outcome, Response
from otel_torchprof._export.sending import ExportStats

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

_parse = cli._parser
NAMES = (
    "aten::mm",
    "train step",
    "\x1b[31mred\x1b]0;title\x07",
    "a\u202egnp.exe",
    "\x7f\x9b1m",
    "caf\u00e9 \U0001f600",
    "x\r\ny",
)
VALUES = (
    None, True, False, 0, -1, 2**63, 2**64, -(2**70), 10**400, 1e308, -0.0, float("nan"), float("inf"), "", "abc", "1e400", "\ud800",
    "9" * 5000, "\x1b[2J", [], {}, [[]], {"a": {}}, [1, "x"], {"key": 1}, "0x10", "-1", "f" * 17, "\x00",
)  # fmt: skip
DEEP = ("[" * 100_000, '{"a":' * 50_000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000)


@dataclass(frozen=True)
class Malformed:
    """A file's content, and how many of its events come before the fault."""

    content: bytes
    whole: int = 0
    is_otlp: bool = True
    """``send`` takes it, were it not for the fault."""


# ---- files without a fault ----


def spans(number: random.Random, count: int) -> list[dict[str, Any]]:
    """OTLP/JSON objects."""
    found = []
    for index in range(count):
        start = 10**18 + index * 1000
        attributes = [
            {"key": "torch.step.number", "value": {"intValue": str(index)}},
            {"key": "a", "value": {"stringValue": "b" * index}},
        ]
        if number.random() < 0.3:
            attributes.append({"key": "torch.aggregated.count", "value": {"intValue": "7"}})
            attributes.append({"key": "torch.aggregated.duration", "value": {"doubleValue": 1e-6}})
        found.append(
            {
                "traceId": f"{number.getrandbits(128) | 1:032x}",
                "spanId": f"{index + 1:016x}",
                "parentSpanId": f"{index:016x}" if index else "",
                "name": number.choice((*NAMES, "torch.step")),
                "kind": 1,
                "startTimeUnixNano": str(start),
                "endTimeUnixNano": str(start + 500),
                "attributes": attributes,
                "events": [{"timeUnixNano": str(start), "name": "e"}],
            }
        )
    return found


def requests(number: random.Random) -> list[dict[str, Any]]:
    """OTLP/JSON requests."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "trainer"}}]}
    return [
        {
            "resourceSpans": [
                {
                    "resource": resource,
                    "scopeSpans": [{"scope": {"name": "s"}, "spans": spans(number, each)}],
                    "schemaUrl": "u",
                }
            ]
        }
        for each in (number.randint(1, 4), 2, 1)
    ]


def lines(number: random.Random) -> list[bytes]:
    """A file of OTLP/JSON, request by request."""
    return [json.dumps(each).encode() + b"\n" for each in requests(number)]


def messages(number: random.Random, *, sized: bool = False) -> list[bytes]:
    """A file of OTLP protobuf, request by request."""
    found = [otlp_json.request_of(each).SerializeToString() for each in requests(number)]
    return [struct.pack(">I", len(each)) + each for each in found] if sized else found


def slices(number: random.Random) -> list[dict[str, Any]]:
    """Events of a Chrome trace, ours and torch's."""
    found: list[dict[str, Any]] = []
    for index in range(number.randint(1, 8)):
        args: dict[str, Any] = {}
        if number.random() < 0.5:
            args = {
                "span_id": f"{index + 1:016x}",
                "parent_id": f"{index:016x}",
                "trace_id": "t",
                "attributes": {"torch.step.number": 1},
            }
        name = number.choice((*NAMES, "ProfilerStep#3"))
        found.append(
            {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": index + 0.5, "dur": 1.25, "args": args}
        )
    return found


def chrome(number: random.Random) -> list[bytes]:
    """A file of Chrome JSON, event by event; what precedes them and what follows are with the first and the last."""
    found = [
        json.dumps(each, ensure_ascii=number.random() < 0.5).encode("utf-8", "surrogatepass") for each in slices(number)
    ]
    begin, end = number.choice(((b'{"displayTimeUnit": "ns", "traceEvents": [\n', b"\n]}"), (b"[", b"]\n")))
    return [begin + found[0], *(b",\n" + each for each in found[1:]), end]


def _spans_in(message: bytes) -> int:
    found = ExportTraceServiceRequest.FromString(message)
    return sum(len(scope.spans) for resource in found.resource_spans for scope in resource.scope_spans)


def _is_counted(event: bytes) -> int:
    return int(b'"ph": "X"' in event)


FORMS: dict[str, tuple[Callable[[random.Random], list[bytes]], Callable[[bytes], int]]] = {
    "chrome": (chrome, _is_counted),
    "lines": (lines, lambda line: line.count(b'"spanId"')),
    "protobuf": (messages, _spans_in),
    "sized": (lambda number: messages(number, sized=True), lambda message: _spans_in(message[4:])),
}


# ---- faults ----


def malformed(seed: int) -> Malformed:
    """The input of that number."""
    number = random.Random(seed)
    form = number.choice(list(FORMS))
    pieces, count = list(_whole_file(form, number.randrange(200))), FORMS[form][1]
    fault = number.choices((bytes_changed, _values_changed, _grown, _mixed), (60, 31, 1, 8))[0]
    if fault is bytes_changed:
        content, at = bytes_changed(number, b"".join(pieces))
        whole = _whole(pieces, at, count)
    else:
        content, whole = fault(number, form, pieces, count)
    if number.random() < 0.2:
        content = gzip.compress(content, 1, mtime=0)
        if number.random() < 0.3:  # a fault in what is compressed: how much of it can be read is not known
            content, whole = bytes_changed(number, content)[0], 0
    return Malformed(content, whole, form != "chrome")


@functools.cache
def _whole_file(form: str, variant: int) -> tuple[bytes, ...]:
    return tuple(FORMS[form][0](random.Random(variant)))


def _whole(pieces: list[bytes], at: int, count: Callable[[bytes], int]) -> int:
    """Events of the pieces that end before the fault."""
    found = end = 0
    for piece in pieces:
        end += len(piece)
        if end > at:
            break
        found += count(piece)
    return found


def bytes_changed(number: random.Random, data: bytes) -> tuple[bytes, int]:
    """Some bytes cut off, changed, inserted, taken out or doubled, and where the first of them is."""
    changed, first = bytearray(data), len(data)
    for _ in range(number.choice((1, 1, 1, 2, 5))):
        at = number.randrange(len(changed) + 1)
        first = min(first, at)
        kind = number.randrange(7)
        if kind == 0:
            del changed[at:]
        elif kind == 1 and at < len(changed):
            changed[at] ^= 1 << number.randrange(8)
        elif kind == 2:
            changed[at:at] = number.randbytes(number.choice((1, 2, 8)))
        elif kind == 3:
            del changed[at : at + number.randint(1, 40)]
        elif kind == 4:
            changed[at:at] = changed[at : at + number.randint(1, 200)]
        elif kind == 5:
            inserted = (
                b"\xff" * 9,
                b"\x00" * 9,
                b"\n",
                b'"',
                b"]",
                b"}",
                b"\x80\x80",
                b"\xed\xa0\x80",
                b"\xff\xfe",
                b"1e999",
                b"\x1b[1m",
            )
            changed[at:at] = number.choice(inserted)
        else:
            changed[at : at + 1] = bytes([number.choice(b'{}[]",:\\\n\x0a\x12\x00\xff')])
    return bytes(changed), first


def _values_changed(
    number: random.Random, form: str, pieces: list[bytes], count: Callable[[bytes], int]
) -> tuple[bytes, int]:
    """One value in the JSON of one piece is another."""
    at = number.randrange(len(pieces))
    if form in {"protobuf", "sized"}:
        changed, _ = bytes_changed(number, pieces[at][4:] if form == "sized" else pieces[at])
        pieces[at] = struct.pack(">I", len(changed)) + changed if form == "sized" else changed
        return b"".join(pieces), sum(map(count, pieces[:at]))
    texts = re.findall(rb'"(?:[^"\\]|\\.)*"|-?[\d.]+|\{\}|\[\]', pieces[at])
    if texts:
        requested = number.choice(texts)
        weird = number.choice(VALUES)
        new = number.choice(DEEP) if number.random() < 0.02 else json.dumps(weird)
        pieces[at] = pieces[at].replace(requested, new.encode("utf-8", "surrogatepass"), number.choice((1, 1, -1)))
    return b"".join(pieces), sum(map(count, pieces[:at]))


def _grown(number: random.Random, form: str, pieces: list[bytes], count: Callable[[bytes], int]) -> tuple[bytes, int]:
    """Something is there very many times."""
    at = number.randrange(len(pieces))
    unit = number.choice(
        (b"{},", b"[", b" ", b"\n", b"\x12\x00", b"\x0a\x00", b"\x00", b"\\", b"9", b"\xf0\x9f\x98\x80", pieces[at])
    )
    size = number.choice((1 << 10, 1 << 12, 1 << 16, 1 << 20))
    place = number.randrange(len(pieces[at]) + 1)
    pieces[at] = pieces[at][:place] + unit * (size // len(unit)) + pieces[at][place:]
    return b"".join(pieces), sum(map(count, pieces[:at]))


def _mixed(number: random.Random, form: str, pieces: list[bytes], count: Callable[[bytes], int]) -> tuple[bytes, int]:
    """A part of a file of another form is among it."""
    at = number.randint(1, len(pieces))
    other = _whole_file(number.choice(list(FORMS)), number.randrange(200))
    cut = b"".join(other)
    inserted = cut[: number.randrange(len(cut) + 1)] if number.random() < 0.5 else cut
    return b"".join((*pieces[:at], inserted, *pieces[at:])), sum(map(count, pieces[:at]))


# ---- reading them ----


class _Receiver:
    """Stands for the sender: every request arrives."""

    def __init__(self, settings: Any, name: str) -> None:
        self.settings = settings
        self.spans = self.largest = 0

    def deliver(self, message: bytes, deadline: Any) -> Response:
        self.largest = max(self.largest, len(message))
        return Response(Outcome.ACCEPTED)

    def count(self, response: Response, spans: int) -> bool:
        self.spans += spans
        return True

    @property
    def stats(self) -> ExportStats:
        return ExportStats(accepted_spans=self.spans)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    with mock.patch.object(sys, "stdout", io.StringIO()) as out, mock.patch.object(sys, "stderr", io.StringIO()) as err:
        yield out, err


PLACE = re.compile(r"at byte \d+|cannot read .* after byte \d+|is a trace without a span|no steps")


def check(path: Path, made: Malformed, words: tuple[str, ...] = ()) -> tuple[int, int]:
    """Shows and sends the file; returns both exit statuses. Raises AssertionError where it is not as it must be."""
    path.write_bytes(made.content)
    with mock.patch.object(cli, "_parser", return_value=_Parser()):
        return _check_show(path, made, words), _check_send(path, made)


class _Parser:
    """Parses what differs in the path only once: that takes longer than what is tested."""

    parsed: ClassVar[dict[tuple[str, ...], argparse.Namespace]] = {}

    def parse_args(self, words: list[str]) -> argparse.Namespace:
        *others, path = words
        if tuple(others) not in self.parsed:
            self.parsed[tuple(others)] = _parse().parse_args(words)
        options = copy.copy(self.parsed[tuple(others)])
        options.file, options.files = path, [path]
        return options


def _check_show(path: Path, made: Malformed, words: tuple[str, ...]) -> int:
    counted: list[int] = []

    def read(*names: str, **watch: Any) -> Any:
        found = _cli_show_read(*names, **watch)
        counted.append(len(found[0]))
        return found

    with mock.patch.object(show_command, "read", read), _captured() as (out, err):
        status = cli.main(["show", *words, str(path)])
    _check_texts(path, status, out.getvalue(), err.getvalue())
    assert sum(counted) >= made.whole, f"{made.whole} events come before the fault, {sum(counted)} are counted"
    assert bool(out.getvalue()) or status == 1
    return status


def _check_send(path: Path, made: Malformed) -> int:
    receivers: list[_Receiver] = []

    def sender(settings: Any, name: str) -> _Receiver:
        receivers.append(_Receiver(settings, name))
        return receivers[-1]

    with mock.patch.object(send_command, "Sender", sender), _captured() as (out, err):
        status = cli.main(["send", "--endpoint", "http://localhost:1", "--protocol", "http/protobuf", str(path)])
    _check_texts(path, status, out.getvalue(), "\n".join(err.getvalue().splitlines()[:-1]))
    if made.is_otlp:
        assert receivers[0].spans >= made.whole, (
            f"{made.whole} spans come before the fault, {receivers[0].spans} are sent"
        )
    return status


def _check_texts(path: Path, status: int, out: str, err: str) -> None:
    for text in (out, err):
        if not text.replace("\n", "").isprintable():
            bad = [char for char in text if not char.isprintable() and char != "\n"]
            raise AssertionError(f"characters that are not printable: {bad[:5]!r}")
    assert status in {0, 1}
    if status:
        assert repr(str(path)) in err, f"the file is not named: {err[:300]!r}"
        assert PLACE.search(err), f"no place is named: {err[:300]!r}"
        assert len(err) < 4000, f"a message of {len(err)} characters"


_cli_show_read = show_command.read
