"""Samples of Python stacks in Chrome JSON: V8's events ``Profile`` and ``ProfileChunk``, which Perfetto draws as flame graphs.

Perfetto does not display the Trace Event Format's own ``stackFrames`` and ``samples``. Each chunk is a profile of its own, named by its
thread and time, with all its frames. Frames are named as Kineto names calls, ``train.py(5): log``, since viewers display no line beside a name.
``durations`` is of this package: the time that each sample stands for, in us as all times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_torchprof import config
from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.samples import SAMPLES, kept_calls

from .chrome_json import compact, valid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._columns.batch import RecordedThread
    from otel_torchprof._columns.samples import Call, Samples

CATEGORY = "python_samples"
_MOST_SAMPLES = 1_000
_MOST_BYTES = 1 << 18
"""Bytes of frames after which a chunk ends: readers take events of a megabyte."""
_TIME_BITS = 42
"""Bits of a chunk's id with its time, which is 50 days in us; those before are its thread's, of which Linux uses 22."""
_ID_BITS = 64
"""Perfetto reads an id as a hexadecimal number of so many bits."""


def sample_pieces(
    samples: Samples | None, threads: Sequence[RecordedThread], base_ns: int, pid: int
) -> Iterator[bytes]:
    """Encodes samples as lines of JSON, a piece per chunk; none if an attribute with names of files or functions is hidden.

    Costs some us per sample.
    """
    if samples is None or not len(samples) or config.HIDDEN_ATTRIBUTES.read() & (config.CODE | {SAMPLES}):
        return
    microseconds, durations = (samples.time - base_ns) // 1000, samples.duration // 1000
    for thread in distinct_values(samples.thread).tolist():
        rows = np.flatnonzero(samples.thread == thread)
        chunk = _Chunk()
        columns = (microseconds[rows].tolist(), durations[rows].tolist(), samples.stack[rows].tolist())
        for time, duration, stack in zip(*columns, strict=True):
            if len(chunk.times) == _MOST_SAMPLES or chunk.size > _MOST_BYTES:
                yield chunk.encoded(threads[thread].os_tid, pid)
                chunk = _Chunk()
            chunk.add(time, duration, stack, samples.stacks[stack])
        yield chunk.encoded(threads[thread].os_tid, pid)


class _Chunk:
    """Samples of one thread, and the frames of their stacks as a tree."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the frames."""
        self._nodes: list[str] = []
        self.times: list[int] = []
        self._durations: list[int] = []
        self._samples: list[int] = []
        self._numbers: dict[tuple[int, Call], int] = {}
        self._leaves: dict[int, int] = {}

    def add(self, time: int, duration: int, number: int, stack: tuple[Call, ...]) -> None:
        """Adds a sample; times in us, ``number``: of its stack."""
        leaf = self._leaves.get(number)
        if leaf is None:
            leaf = 0
            for call in reversed(kept_calls(stack)):
                leaf = self._numbers.get((leaf, call)) or self._node(leaf, call)
            self._leaves[number] = leaf
        if leaf:
            self.times.append(time)
            self._durations.append(duration)
            self._samples.append(leaf)

    def _node(self, parent: int, call: Call) -> int:
        number = self._numbers[parent, call] = len(self._nodes) + 1
        file, function = valid(call.file), valid(call.function)
        name = f"{file}({call.line}): {function}"
        frame = {"functionName": name, "url": file, "lineNumber": max(call.line - 1, 0), "scriptId": 0}
        node = compact({"id": number, **({"parent": parent} if parent else {}), "callFrame": frame})
        self._nodes.append(node)
        self.size += len(node)
        return number

    def encoded(self, tid: int, pid: int) -> bytes:
        """The two events, each after a comma and a line feed."""
        if not self.times:
            return b""
        start = self.times[0]
        number = (tid << _TIME_BITS | start % (1 << _TIME_BITS)) % (1 << _ID_BITS)
        event = {"ph": "P", "cat": CATEGORY, "id": f"{number:#x}", "pid": pid, "tid": tid, "ts": start}
        profile = {**event, "name": "Profile", "args": {"data": {"startTime": start}}}
        columns = {
            "samples": self._samples,
            "timeDeltas": np.diff(self.times, prepend=start).tolist(),
            "durations": self._durations,
        }
        leaves, deltas, durations = (f'"{key}":{compact(values)}' for key, values in columns.items())
        data = f'{{"cpuProfile":{{"nodes":[{",".join(self._nodes)}],{leaves}}},{deltas},{durations}}}'
        chunk = compact({**event, "name": "ProfileChunk"})[:-1]
        return f',\n{compact(profile)},\n{chunk},"args":{{"data":{data}}}}}'.encode()
