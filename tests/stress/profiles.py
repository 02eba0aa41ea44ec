"""Profiles with random options, nested, crossing, dropped, stopped elsewhere, and what must hold of each that ended well."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import otel_torchprof as otp
from otel_torchprof._columns.schema import Kind

if TYPE_CHECKING:
    import collections
    from collections.abc import Iterator

    from world import Worker

HANDED_OVER = "handed over"
"""Name of labels that begin on one thread and end on another."""
IN_TASK = "label in task"
"""In the names of labels that stay open while their task waits and other calls are made."""
_FULL = "16 recordings hold data"
"""What it says where as many recordings run as can."""


def frame_filter(worker: Worker) -> otp.FrameFilter:
    """Any."""
    choose = worker.random.choice
    return otp.FrameFilter(
        include=choose([(), ("world",), ("torch", "profiles"), ("nowhere",)]),
        exclude=choose([(), ("threading",), ("*/actions.py",), ("asyncio", "json")]),
        max_depth=choose([None, None, 1, 5]),
        min_duration=choose([0.0, 1e-6]),
        c_functions=worker.chance(0.7),
        modules_only=worker.chance(0.1),
    )


def options(worker: Worker) -> dict[str, Any]:
    """Any options of a profile."""
    found: dict[str, Any] = {
        name: worker.chance(share)
        for name, share in {
            "with_stack": 0.7,
            "record_shapes": 0.4,
            "profile_memory": 0.3,
            "all_threads": 0.4,
            "with_modules": 0.3,
            "with_flops": 0.1,
        }.items()
    }
    if worker.chance(0.3):
        found["frames"] = frame_filter(worker)
    if worker.chance(0.1):
        found["memory_limit"] = 1 << 20
    return found


@contextlib.contextmanager
def refused_where_full() -> Iterator[None]:
    """Around the start of a recording."""
    try:
        yield
    except otp.NativeError as error:
        if _FULL not in str(error):
            raise


def begun(worker: Worker, **more: Any) -> otp.profile | None:
    """A profile that runs, or none where there are as many as can be, or torch's has the thread's memory."""
    found = otp.profile(**{**options(worker), **more})
    try:
        with refused_where_full():
            found.start()
            return found
    except otp.NativeError:
        raise
    except otp.TorchProfError as error:
        if "profile_memory" not in str(error):
            raise
    return None


class Expected:
    """What must be in a profile of a thread that begins now: the labels that the thread begins."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._before = worker, worker.labels.copy()

    def counts(self) -> collections.Counter[str]:
        """By name."""
        return self._worker.labels - self._before


def check(worker: Worker, found: otp.profile, labels: collections.Counter[str] | None) -> None:
    """Notes what is wrong with a profile that has ended: times, parents, the labels of its thread."""
    start, end, parent = (found.columns[name] for name in ("start", "end", "parent"))
    if (end < start).any():
        worker.world.fail(f"{worker.name}: {(end < start).sum()} events end before they begin")
    rows = (parent >= 0).nonzero()[0]
    if (parent[rows] >= rows).any():
        worker.world.fail(f"{worker.name}: parents stand behind their children")
    if (start[rows] < start[parent[rows]]).any():
        worker.world.fail(f"{worker.name}: events begin before their parents")
    _check_ends(worker, found, rows)
    if labels is not None and not found.health.dropped:
        _check_labels(worker, found, labels)


def _check_ends(worker: Worker, found: otp.profile, rows: Any) -> None:
    """Calls end after the calls and labels inside, but for labels that are handed over, and where another tool took the thread."""
    if worker.world.tools or "another tool profiled them" in str(found.health):
        return
    end, parent, kind, names = (found.columns[name] for name in ("end", "parent", "kind", "name"))
    rows = rows[((kind[rows] == Kind.LABEL) | (kind[rows] == Kind.FRAME)) & (kind[parent[rows]] == Kind.FRAME)]
    late = rows[end[rows] > end[parent[rows]]].tolist()
    late = [row for row in late if not any(kind in found.names[names[row]] for kind in (HANDED_OVER, IN_TASK))]
    if late:
        inner, outer = (found.names[names[row]] for row in (late[0], parent[late[0]]))
        by = (end[late[0]] - end[parent[late[0]]]) / 1e3
        flags = found.columns["flags"][[late[0], parent[late[0]]]].tolist()
        text = f"{len(late)} events end after the call around them: {inner} in {outer}, by {by:g} us, flags {flags}; {found.health}"
        worker.world.fail(f"{worker.name}: {text}")


def _check_labels(worker: Worker, found: otp.profile, labels: collections.Counter[str]) -> None:
    names = [found.names[name] for name in found.columns["name"][found.columns["kind"] == Kind.LABEL].tolist()]
    for name, count in labels.items():
        if names.count(name) != count:
            worker.world.fail(f"{name}: {names.count(name)} of {count} labels in a profile; {found.health}")


def read(worker: Worker, found: otp.profile) -> None:
    """Reads it in one of the ways that there are."""
    path = str(worker.world.folder / f"{worker.name}.{worker.random.randrange(4)}")
    ways = [
        lambda: found.key_averages().table(row_limit=5),
        lambda: [event.cpu_parent for event in found.events()[:50]],
        lambda: [span.name for span in found.spans()[:50]],
        lambda: sum(map(len, found.to_otlp())),
        lambda: found.export_chrome_trace(f"{path}.json"),
        lambda: found.export_otlp(f"{path}.otlp"),
        lambda: found.export(otp.OTLPExporter(worker.world.http_url, protocol="http/protobuf", timeout=1)),
        lambda: str(found.health),
    ]
    with contextlib.suppress(otp.ExportError):  # the receiver refuses
        worker.random.choice(ways)()


def profiled(worker: Worker) -> None:
    """A profile as a block."""
    found = begun(worker)
    if found is None:
        return
    expected = Expected(worker)
    try:
        with worker.label():
            worker.some()
    finally:
        counts = expected.counts()
        found.stop()
    check(worker, found, counts)
    if worker.chance(0.5):
        read(worker, found)


def crossing(worker: Worker) -> None:
    """Two profiles, of which the first ends first."""
    first = begun(worker)
    expected = [Expected(worker)]
    worker.some(1)
    second = begun(worker)
    expected.append(Expected(worker))
    worker.some(2)
    for found, labels in zip((first, second), expected, strict=True):
        counts = labels.counts()
        if found is not None:
            found.stop()
            check(worker, found, counts)
        with worker.label():
            worker.some(1)


def stopped_elsewhere(worker: Worker) -> None:
    """A profile that another thread stops while its own goes on or waits."""
    found = begun(worker)
    if found is None:
        return
    thread = threading.Thread(target=found.stop)
    worker.some(2)
    thread.start()
    worker.some(2)
    thread.join()
    check(worker, found, None)


def left_running(worker: Worker) -> None:
    """A profile that whoever comes next stops, on any thread."""
    left = worker.world.left_profiles
    with contextlib.suppress(IndexError):
        found = left.popleft()
        found.stop()
        check(worker, found, None)
    if len(left) < 2 and (found := begun(worker)) is not None:
        left.append(found)


def dropped(worker: Worker) -> None:
    """A running profile in a reference cycle, which the collector drops, whenever it comes."""
    found = begun(worker, with_stack=True)
    cycle: list[Any] = [found]
    cycle.append(cycle)
    del found, cycle
    worker.some(1)


class _Stops:
    """Stops a profile when it is finalized, in a reference cycle."""

    def __init__(self, found: otp.profile) -> None:
        self.found, self.itself = found, self

    def __del__(self) -> None:
        try:
            self.found.stop()
        except otp.NativeError as error:
            if "belongs to the parent" not in str(error):
                raise
        except RecursionError:  # too little was left of the stack: whatever starts or stops next does the rest
            return


def stopped_by_finalizer(worker: Worker) -> None:
    """A profile that a finalizer stops, inside of a collection, on whichever thread that happens."""
    found = begun(worker, with_stack=True)
    if found is not None:
        _Stops(found)
        if worker.chance(0.5):
            del found  # both are garbage
        worker.some(2)


ACTIONS = {
    "profiled": profiled,
    "crossing": crossing,
    "stopped elsewhere": stopped_elsewhere,
    "left running": left_running,
    "dropped": dropped,
    "stopped by finalizer": stopped_by_finalizer,
}
