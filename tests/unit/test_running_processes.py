"""What a running process does, from what its box has at each look: rates, shares, operators, late ranks. Boxes and clocks are made up."""

from __future__ import annotations

import pytest
from rank_boxes import NOW, SECOND, call, contents

from otel_torchprof._answers.running import LAG_NS, RunningProcess, StepCounter, jobs, open_threads, with_late_ranks
from otel_torchprof._cli import top_sources
from otel_torchprof._cli.top_sources import RunningBox
from otel_torchprof._columns.batch import Batch, RecordedThread
from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._files.rank_state import run_of
from otel_torchprof._process.threads import NAME
from otel_torchprof._ranks.ranks import identity_in

MS = 10**6
LOOP, OTHER, OWN = (
    RecordedThread(1000, 1, 0, "python"),
    RecordedThread(7, 2, 0, "loader"),
    RecordedThread(8, 3, 0, NAME),
)


class Box:
    """A box to which events are added; times are ms since NOW."""

    def __init__(self) -> None:
        self._rows: list[dict] = []
        self._from = float("-inf")
        self.collectives: list = []

    def add(self, name, start: float, end: float | None, *, parent: int = -1, thread: int = 0, key: int = 1) -> int:
        """Adds an event, a phase if its name is a part; returns its row. Without an end it is open."""
        is_phase = isinstance(name, Part)
        self._rows.append(
            {
                "name": name.event_name if is_phase else name,
                "kind": Kind.PHASE if is_phase else Kind.OPERATOR,
                "fwd_thread": name if is_phase else 0,
                "sequence_nr": key,
                "start": start,
                "end": end,
                "parent": parent,
                "thread": thread,
            }
        )
        return len(self._rows) - 1

    def forget(self, before_ms: float) -> None:
        """Displays, from now on, events that ended at this time or later."""
        self._from = before_ms

    def step(self, start: float, *, milliseconds: float = 100) -> None:
        """A step: a tenth of it loads, four tenths are forward, three backward, a tenth is the optimizer's, and a tenth is nothing."""
        unit = milliseconds / 10
        for part, begin, end in (
            (Part.NEXT, 0, 1),
            (Part.FORWARD, 1, 5),
            (Part.BACKWARD, 5, 8),
            (Part.STEP, 8, 9),
        ):
            self.add(part, start + begin * unit, start + end * unit)

    def at(self, time_ms: float, rank: int | None = 0):
        """The contents at a time."""
        last = NOW + round(time_ms * MS)
        is_kept = [row["end"] is None or row["end"] >= self._from for row in self._rows]
        rows = [row for row, kept in zip(self._rows, is_kept, strict=True) if kept and row["start"] <= time_ms]
        names = ["", *sorted({row["name"] for row in rows})]
        columns: dict[str, list] = {
            key: [row[key] for row in rows] for key in ("kind", "fwd_thread", "sequence_nr", "parent", "thread")
        }
        columns["name"] = [names.index(row["name"]) for row in rows]
        columns["start"] = [NOW + round(row["start"] * MS) for row in rows]
        is_open = [row["end"] is None or row["end"] > time_ms for row in rows]
        columns["end"] = [
            last if opened else NOW + round(row["end"] * MS) for row, opened in zip(rows, is_open, strict=True)
        ]
        columns["flags"] = [int(Flag.UNFINISHED) if opened else 0 for opened in is_open]
        batch = Batch.of(columns, names, [LOOP, OTHER, OWN])
        return contents(rank, *self.collectives, last_ns=last, pid=1000 + (rank or 0), events=lambda _: iter([batch]))


def looked(box: Box, *times_ms: float, rank: int | None = 0):
    """The view after looks at these times, in ms."""
    process = RunningProcess(NOW)
    return [process.look(box.at(at, rank), NOW + round(at * MS)) for at in times_ms][-1]


def test_shares_and_rates_of_a_loop():
    """Ten steps a second have the shares that their phases have, and the rate of the steps."""
    box = Box()
    for at in range(40):
        box.step(at * 100)
    view = looked(box, 1050, 2050, 3050)
    assert view.step_rate == pytest.approx(10)
    assert view.step in range(28, 31)
    assert view.shares == pytest.approx(
        {"data": 0.1, "forward": 0.4, "backward": 0.3, "optimizer": 0.1, "unattributed": 0.1}, abs=0.01
    )
    assert not view.is_numbered


def test_shares_of_a_full_box():
    """Where later events have taken the place of earlier ones, shares are those of the time that the box still has."""
    box = Box()
    for at in range(40):
        box.step(at * 100)
    box.forget(3000)
    found = box.at(4050)._replace(complete_since_ns=NOW + 3000 * MS)
    assert RunningProcess(NOW).look(found, NOW + 4050 * MS).shares == pytest.approx(
        {"data": 0.1, "forward": 0.4, "backward": 0.3, "optimizer": 0.1, "unattributed": 0.1}, abs=0.01
    )


def accumulating(box: Box, passes: int, milliseconds: float, until_ms: float) -> float:
    """Adds steps of so many forward and backward passes, each of this length; returns the rate."""
    at, steps = 0.0, 0
    while at < until_ms:
        for _ in range(passes):
            box.add(Part.NEXT, at, at + 0.1 * milliseconds)
            box.add(Part.FORWARD, at + 0.1 * milliseconds, at + 0.4 * milliseconds)
            box.add(Part.BACKWARD, at + 0.4 * milliseconds, at + 0.9 * milliseconds)
            at += milliseconds
        box.add(Part.STEP, at, at + 5)
        box.add(Part.ZEROING, at + 5, at + 6)
        at += 6
        steps += 1
    return steps * 1000 / at


@pytest.mark.parametrize(("passes", "milliseconds"), [(4, 50), (16, 100), (3, 30)])
def test_steps_of_several_backward_passes(passes, milliseconds):
    """A step with accumulated gradients counts once, and one in whose middle the first look begins does not change the rate."""
    box = Box()
    rate = accumulating(box, passes, milliseconds, 30_000)
    process = RunningProcess(NOW + 10_000 * MS)
    box.forget(10_030)
    views = [process.look(box.at(at), NOW + at * MS) for at in range(20_000, 29_000, 1000)]
    assert [view.step_rate for view in views] == pytest.approx([rate] * len(views), rel=0.01)
    assert views[-1].step - views[0].step == pytest.approx(8 * rate, abs=1)


@pytest.mark.parametrize(("passes", "found"), [(16, 3), (64, 3)])
def test_a_first_look_goes_back_to_slow_steps(passes, found, monkeypatch, tmp_path):
    """Where ten seconds have no two whole steps of a process that trains, the first look reads more of the box."""
    box, path = Box(), tmp_path / "a.otpbox"
    rate = accumulating(box, passes, 500, 200_000)
    path.touch()

    class Reader:
        def read(self, since: int):
            box.forget((since - NOW) / MS)
            return box.at(200_000)

    monkeypatch.setattr(top_sources.ImageReader, "of_file", lambda _file: Reader())
    view = RunningBox(path, NOW + 200_000 * MS).view
    assert view.step_rate == pytest.approx(rate, rel=0.01)
    assert view.step >= found
    assert sum(view.shares.values()) == pytest.approx(1, abs=0.01)


def test_looks_at_any_times_find_the_same():
    """However often a box is looked at, and whatever is open then, no step and no time is counted twice or left out."""
    box = Box()
    for at in range(30):
        box.step(at * 100)
    often, once = looked(box, *range(51, 3000, 130), 3050), looked(box, 3050)
    assert often.step == once.step
    assert often.shares == pytest.approx(once.shares)


def test_a_step_that_hangs():
    """While a phase stays open its share grows and the rate of steps falls; what is open is known with its begin."""
    box = Box()
    for at in range(10):
        box.step(at * 100)
    data = box.add(Part.NEXT, 1000, None)
    box.add("read_file", 1001, None, parent=data)
    view = looked(box, *range(1050, 21000, 1000), 21050)
    assert view.shares == pytest.approx({"data": 1.0, "unattributed": 0.0})
    assert 0 < view.step_rate < 1
    (thread,) = view.threads
    assert [(each.name, each.since_ns - NOW) for each in thread.calls] == [
        ("torch.phase.data", 1000 * MS),
        ("read_file", 1001 * MS),
    ]


def test_operators_by_self_time():
    """An operator's share is its self time, on all threads, within the seconds that are displayed."""
    box = Box()
    outer = box.add("outer", 0, 1000)
    box.add("inner", 200, 900, parent=outer)
    box.add("inner", 0, 500, thread=1)
    view = looked(box, 500 + LAG_NS / MS, 1000 + LAG_NS / MS)
    assert [(each.name, pytest.approx(each.share)) for each in view.operators] == [("inner", 1.2), ("outer", 0.3)]
    assert view.shares == {}
    assert view.step is None
    assert view.step_rate is None


def test_time_in_collectives():
    """Collectives that overlap count once; one that is pending counts up to now."""
    box = Box()
    box.collectives = [
        call(0, enqueued_ns=NOW, completed_ns=NOW + 300 * MS),
        call(1, enqueued_ns=NOW + 200 * MS, completed_ns=NOW + 400 * MS),
        call(2, "pending", enqueued_ns=NOW + 900 * MS),
    ]
    assert looked(box, 1000 + LAG_NS / MS).collectives == pytest.approx(0.5)
    box.collectives = []
    assert looked(box, 1000).collectives is None


def test_open_events_by_thread():
    """The thread of the loop comes first, then the main one; threads of this package are left out."""
    box = Box()
    for thread in (2, 1, 0):
        box.add("work", 0, None, thread=thread)
    assert [(each.os_tid, each.name) for each in open_threads(box.at(5))] == [(1000, "main"), (7, "loader")]
    assert [each.os_tid for each in open_threads(box.at(5), loop=OTHER.ident)] == [7, 1000]


@pytest.mark.parametrize(
    ("shares", "late"),
    [
        ((0.5, 0.02, 0.6, 0.55), [1]),
        ((0.05, 0.02, 0.06, 0.05), []),
        ((0.5, None, 0.5, 0.45), []),
        ((0.3,), []),
        ((0.9, 0.0), [1]),
    ],
)
def test_the_rank_that_others_wait_for(shares, late):
    """It is the one that is clearly less in collectives than the others of its run."""
    views = [looked(Box(), 1000, rank=rank)._replace(collectives=share) for rank, share in enumerate(shares)]
    assert [view.rank for view in with_late_ranks(views) if view.is_late] == late


def test_ranks_of_other_runs_are_not_compared():
    """Two processes of different runs may wait differently."""
    views = [looked(Box(), 1000, rank=rank)._replace(collectives=float(rank)) for rank in (0, 1)]
    views[1] = views[1]._replace(run=views[1].run._replace(run_id="other"))
    assert not any(view.is_late for view in with_late_ranks(views))


def test_jobs_without_a_name_of_their_run_are_told_apart():
    """Two processes of one rank are of two jobs, by their pids; address and port of the master are the name where there is no other."""
    views = [
        looked(Box(), 1000, rank=at % 2)._replace(pid=pid, collectives=at / 9) for at, pid in enumerate((7, 8, 21, 20))
    ]
    assert [[view.pid for view in job] for job in jobs(views)] == [[7, 8], [20, 21]]
    assert [view.pid for view in with_late_ranks(views) if view.is_late] == [7, 21]
    masters = [{"MASTER_ADDR": "a", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"} for port in ("1", "2", "2")]
    assert [run_of(identity_in(each)).run_id for each in masters] == ["a:1", "a:2", "a:2"]
    assert run_of(identity_in({**masters[0], "TORCHELASTIC_RUN_ID": "own"})).run_id == "own"


def test_numbers_of_steps_are_those_of_the_process():
    """A step that the process has numbered gives the numbers of those before and after it."""
    steps = StepCounter()
    steps.add([10, 20, 30])
    assert (steps.step, steps.is_numbered) == (3, False)
    steps.number(100, 20)  # it ended when the second of these began
    assert (steps.step, steps.is_numbered) == (102, True)
    steps.add([40])
    assert steps.step == 103
    steps.number(103, 50)  # the next begin is the first after it
    assert steps.step == 103
    steps.add([50])
    assert steps.step == 104


def test_rates_of_slow_steps():
    """Steps of more than ten seconds have a rate too, from the last three begins."""
    steps = StepCounter()
    assert (steps.rate(NOW), steps.seconds(NOW)) == (None, None)
    steps.add([NOW - 7 * SECOND, NOW, NOW + 30 * SECOND, NOW + 60 * SECOND])  # the first may have begun before
    assert steps.rate(NOW + 60 * SECOND) == pytest.approx(1 / 30)
    assert steps.seconds(NOW + 60 * SECOND) == 30
    assert steps.rate(NOW + 150 * SECOND + LAG_NS) == pytest.approx(2 / 90)
