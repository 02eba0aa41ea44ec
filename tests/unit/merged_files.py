"""Trace files of ranks that meet in collectives, on clocks whose offset and drift are known; for tests of ``merge``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from explained_files import _value

from otel_torchprof._files.collectives import CollectiveList

if TYPE_CHECKING:
    from pathlib import Path

    from otel_torchprof._files.collectives import Collectives

BEGIN = 1_790_000_000 * 10**9
"""Unix ns of the first step."""
BASE = 1_789_603_200 * 10**9
STEP = 10_000_000


class WrongClock(NamedTuple):
    """Ahead of the true time by the offset when the recording begins, and by the drift more with each ns from there on."""

    offset: int = 0
    drift: float = 0.0

    def of(self, time: Any) -> Any:
        """What it says at a true time."""
        return time + self.offset + np.rint((np.asarray(time) - BEGIN) * self.drift).astype(np.int64)


class Meetings:
    """When ranks come to the same collectives, and leave them: all after the last has come, each with a delay of its own.

    Args:
        ranks: how many.
        count: of the collectives.
        spacing: ns from one to the next.
        jitter: ns that it takes a rank to wake up, from and to.
        late: ns by which the last rank comes later.
    """

    def __init__(
        self,
        ranks: int,
        count: int,
        spacing: int = STEP,
        jitter: tuple[int, int] = (10_000, 200_000),
        *,
        seed: int = 0,
        late: int = 0,
    ) -> None:
        number = np.random.default_rng(seed)
        begin = BEGIN + np.arange(count) * spacing
        self.start = begin + number.integers(spacing // 10, spacing // 2, (ranks, count))
        self.start[-1] += late
        self.end = self.start.max(axis=0) + number.integers(*jitter, (ranks, count))

    def collectives(self, rank: int, clock: WrongClock) -> Collectives:
        """As a reader finds them in the file of a rank."""
        found = CollectiveList()
        for number, (start, end) in enumerate(
            zip(clock.of(self.start[rank]).tolist(), clock.of(self.end[rank]).tolist(), strict=True)
        ):
            found.add_call(start, end - start, attributes(number))
        return found.settled()

    def trace(self, rank: int, clock: WrongClock, *, is_named: bool = True, **more: Any) -> RankTrace:
        """A recording with a step around each collective, which says or does not say its rank."""
        trace = RankTrace(rank if is_named else None, **more)
        times = zip(self.start[rank].tolist(), self.end[rank].tolist(), strict=True)
        for number, (start, end) in enumerate(times):
            begin = BEGIN + number * STEP
            trace.span("c10d::allreduce_", clock.of(start), clock.of(end), attributes(number))
            trace.span(
                "torch.step", clock.of(begin), clock.of(begin + STEP), _of_step(number, start - begin, end - start)
            )
        return trace


def attributes(number: int, **more: Any) -> dict[str, Any]:
    """Of a synchronous collective."""
    found = {"name": "all_reduce", "group": "0", "sequence_nr": number, **more}
    return {f"torch.collective.{key}": value for key, value in found.items()}


def _of_step(number: int, before: int, in_collective: int) -> dict[str, Any]:
    phases = {"forward": before, "collective": in_collective, "backward": STEP - before - in_collective}
    durations = {f"torch.phase.{name}.duration": time / 1e9 for name, time in phases.items()}
    return {"torch.step.number": number, "torch.step.kind": "training", **durations}


class RankTrace:
    """The spans of a rank; times in Unix ns of its own clock.

    Args:
        rank: None: the file does not say.
        resource: more of its attributes.
    """

    def __init__(self, rank: int | None, **resource: Any) -> None:
        self.rank = rank
        self.resource = {
            "service.name": "trainer",
            **{key.replace("__", "."): value for key, value in resource.items()},
        }
        if rank is not None:
            self.resource["torch.distributed.rank"] = rank
        self.spans: list[tuple[str, int, int, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        """Further events of a Chrome trace, as they are written."""

    def span(self, name: str, start: int, end: int, found: dict[str, Any]) -> None:
        """A span of the loop's thread."""
        self.spans.append((name, int(start), int(end), {**found, "thread.id": 77, "thread.name": "MainThread"}))

    def _ids(self, at: int) -> tuple[str, str, str]:
        """Trace, span and parent: a collective comes before its step."""
        is_step = self.spans[at][0] == "torch.step"
        return f"{at // 2 + 1:032x}", f"{at + 1:016x}", "" if is_step else f"{at + 2:016x}"

    def chrome(self, path: Path, *, pid: int = 4711) -> Path:
        """As a Chrome trace of this package."""
        events = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "trainer"}}]
        events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": 77, "args": {"name": "MainThread"}}]
        texts = [json.dumps(each) for each in (*events, *self.events)]
        for at, (name, start, end, found) in enumerate(self.spans):
            trace_id, span_id, parent_id = self._ids(at)
            args = {"trace_id": trace_id, "span_id": span_id, "parent_id": parent_id, "attributes": found}
            if not parent_id:
                del args["parent_id"]
            drawn = f"ProfilerStep#{found['torch.step.number']}" if name == "torch.step" else name
            event = {"ph": "X", "cat": "cpu_op", "name": drawn, "pid": pid, "tid": 77, "args": args}
            texts.append(f'{json.dumps(event)[:-1]},"ts":{micros(start - BASE)},"dur":{micros(end - start)}}}')
        head = json.dumps({"baseTimeNanoseconds": BASE, "otherData": {"resource": self.resource}})
        path.write_text(f'{head[:-1]},"traceEvents":[\n' + ",\n".join(texts) + "\n]}\n")
        return path

    def request(self) -> dict[str, Any]:
        """As OTLP/JSON."""
        spans = []
        for at, (name, start, end, found) in enumerate(self.spans):
            ids = dict(zip(("traceId", "spanId", "parentSpanId"), self._ids(at), strict=True))
            times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(end)}
            spans.append({"name": name, **ids, **times, "attributes": _pairs(found)})
        scope = {"scope": {"name": "otel_torchprof"}, "spans": spans}
        return {"resourceSpans": [{"resource": {"attributes": _pairs(self.resource)}, "scopeSpans": [scope]}]}

    def lines(self, path: Path) -> Path:
        """As a file of OTLP/JSON."""
        path.write_text(json.dumps(self.request()) + "\n")
        return path


def _pairs(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in found.items()]


def micros(time: int) -> str:
    """Nanoseconds as microseconds, exactly."""
    return f"{'-' if time < 0 else ''}{abs(time) // 1000}.{abs(time) % 1000:03d}"
