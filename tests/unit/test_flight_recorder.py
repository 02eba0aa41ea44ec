"""Dumps of PyTorch's flight recorder beside black boxes: what NCCL has completed, and ranks without a box."""

from __future__ import annotations

import json
import os
import pickle

import pytest
from checked_json import checked
from rank_boxes import NOW, SECOND, UNTRACKED, call, lines, roll_call, state, without_times

from otel_torchprof._cli import main as cli
from otel_torchprof._files.flight_recorder import is_dump, rank_of_file, read_dump, with_dumps
from otel_torchprof._files.rank_state import GroupKey
from otel_torchprof.errors import TorchProfError


def entry(number: int, state: str = "completed", group: str = "0", name: str = "nccl:all_reduce", **more) -> dict:
    """An operation as the flight recorder writes it."""
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 4]],
        "is_p2p": False,
        "output_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": NOW + number * SECOND,
        "time_discovered_started_ns": NOW + number * SECOND + 1 if state != "scheduled" else None,
        "time_discovered_completed_ns": NOW + number * SECOND + 2 if state == "completed" else None,
        "timeout_ms": 600_000,
        **more,
    }


def content(*entries: dict, ranks: str = "[0, 1, 2]") -> dict:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": ranks},
        "7": {"name": "7", "desc": "mesh_dp", "ranks": "[0, 2]"},
    }
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


@pytest.fixture
def dump(tmp_path):
    """Writes a dump of a rank, and reads it; of the moment ``written``."""

    def write(rank: int, *entries: dict, written: int = NOW, form=pickle.dumps, ranks: str = "[0, 1, 2]"):
        path = tmp_path / f"nccl_trace_rank_{rank}"
        data = form(content(*entries, ranks=ranks))
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        os.utime(path, ns=(written, written))
        return read_dump(path, rank)

    return write


def boxes(*numbers: int, size: int = 3):
    """Of ranks that have enqueued so many collectives of NCCL each."""
    return [
        state(rank, *(call(each, UNTRACKED) for each in range(1, number + 1)), size=size)
        for rank, number in enumerate(numbers)
    ]


@pytest.mark.parametrize("form", [pickle.dumps, json.dumps])
def test_a_collective_that_hangs_on_the_device(dump, form):
    """With dumps, ranks that have enqueued the same are told apart: which collective hangs, and where it has not started."""
    dumps = [dump(rank, entry(1), entry(2, "scheduled" if rank == 1 else "started"), form=form) for rank in range(3)]
    assert lines(*boxes(2, 2, 2)) == ["no rank is known to wait for another"]
    states = with_dumps(boxes(2, 2, 2), dumps)[0]
    assert without_times("\n".join(lines(*states))) == (
        "ranks 0-2 wait in all_reduce(sum, float, 4,000 bytes) #2 of the default group since T; it has started on ranks 0, 2 and not on rank 1"
    )
    assert roll_call(*states)[:2] == [
        "ranks 0, 2: in all_reduce(sum, float, 4,000 bytes) #2 of the default group, started, not complete (timeout 600 s)",
        "rank 1: in all_reduce(sum, float, 4,000 bytes) #2 of the default group, not started (timeout 600 s)",
    ]


def test_a_rank_that_is_late(dump):
    """A rank that has not enqueued what the others wait in is named, though NCCL says nothing to its box."""
    dumps = [dump(0, entry(1), entry(2, "started")), dump(1, entry(1)), dump(2, entry(1), entry(2, "started"))]
    found = lines(*with_dumps(boxes(2, 1, 2), dumps)[0])
    assert "ranks 0, 2 wait in all_reduce" in found[0]
    assert found[0].endswith("for rank 1")


def test_a_rank_without_a_box(dump):
    """A rank of which there is only a dump has its place in the wait, and nothing is said of whether it runs."""
    states, _ = with_dumps(boxes(2, 2), [dump(rank, entry(1), entry(2, "started")) for rank in range(3)])
    assert [(each.rank, each.has_box, each.is_dead) for each in states][2] == (2, False, False)
    text = "\n".join((*lines(*states), *roll_call(*states)))
    assert "there is no box" not in text
    assert "not run any more" not in text
    assert "rank 2: in all_reduce(float, 48 bytes) #2 of the default group, started, not complete" in text


def test_dumps_alone(dump):
    """Without any box, dumps say who waits, for whom, and what was called otherwise."""
    dumps = [dump(0, entry(1), entry(2, "started")), dump(1, entry(1)), dump(2, entry(1, name="nccl:broadcast"))]
    found = lines(*with_dumps([], dumps)[0])
    assert found[0].startswith("mismatched: collective #1 of the default group")
    assert any("rank 0 waits in" in line and "for ranks 1-2" in line.replace("1, 2", "1-2") for line in found)


def test_what_the_box_knows_counts(dump):
    """Where the backend said itself what is complete, as gloo does, a dump changes nothing."""
    own = [state(rank, call(1), call(2, "pending"), size=2) for rank in range(2)]
    assert with_dumps(own, [dump(rank, entry(1), entry(2)) for rank in range(2)]) == (own, [])


def test_an_earlier_run(dump):
    """A dump that was written before the run began is left out."""
    before = NOW - 3600 * SECOND
    own = boxes(2, 2)
    dumps = [dump(rank, entry(1), entry(2, "started"), written=before) for rank in range(2)]
    assert with_dumps(own, dumps) == (own, [0, 1])


def test_a_dump_of_an_earlier_moment(dump):
    """A dump after which its rank has enqueued more is left out: what it says is not complete may be since."""
    own = boxes(5, 5)
    assert with_dumps(own, [dump(rank, entry(1), entry(2, "started")) for rank in range(2)]) == (own, [0, 1])


def test_dumps_of_two_runs(dump):
    """Without boxes, only dumps that were written together count."""
    late = [dump(rank, entry(1), entry(2, "started")) for rank in range(2)]
    early = [dump(2, entry(1), written=NOW - 3600 * SECOND)]
    states, left_out = with_dumps([], [*early, *late])
    assert ([state.rank for state in states], left_out) == ([0, 1], [2])


def test_sends_and_receives(dump):
    """A receive that is not complete names its peer."""
    receive = entry(0, "started", name="nccl:recv 0<-2", is_p2p=True, p2p_seq_id=4)
    assert "rank 0 waits in recv from rank 2 of the default group" in "\n".join(
        lines(*with_dumps([], [dump(0, receive)])[0])
    )


def test_groups_have_their_ranks(dump):
    """A group's ranks are those of the dump, in the order of the group."""
    found = dump(0, entry(1, "started", group="7"))
    assert found.calls[0].ranks == "0,2"
    assert found.sizes[GroupKey("0", "")] == 3


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("comm_lib_trace_rank_0", 0),
        ("rank_3.json", 3),
        ("_dump_4", 4),
        ("rank_x", None),
        ("a.otpbox", None),
    ],
)
def test_names_of_files(tmp_path, name, rank):
    """The number at the end of the name is the rank; other files are no dumps."""
    assert rank_of_file(tmp_path / name) == rank


class _Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"version": "2", "entries": [_Evil()]}),
        b"",
        b"\x80",
        b"{",
        b"[" * 100_000,
        b"\x80\x02]q\x00.",
        b'{"version": 1, "entries": 3}',
    ],
    ids=["code", "empty", "cut", "brace", "deep", "list", "entries"],
)
def test_what_is_no_dump(tmp_path, monkeypatch, data):
    """A damaged or hostile file is refused by its name, and nothing of it runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rank_0"
    path.write_bytes(data)
    with pytest.raises(TorchProfError, match=r"rank_0.*no dump of PyTorch's flight recorder"):
        read_dump(path, 0)
    assert not (tmp_path / "evil").exists()


def shared(depth: int) -> list:
    """Lists that share one another: their text is of two to the power of the depth."""
    found: list = []
    for _ in range(depth):
        found = [found, found]
    return found


@pytest.mark.parametrize(
    "damage",
    [
        {"state": 3},
        {"input_sizes": "x"},
        {"input_sizes": shared(100)},
        {"input_sizes": [[10**4000]]},
        {"process_group": []},
        {"process_group": [shared(100)]},
        {"time_created_ns": None},
        {"time_created_ns": -(10**30)},
        {"collective_seq_id": 10**5000},
        {"profiling_name": ""},
        {"profiling_name": None},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_an_entry_that_is_not_understood(dump, damage):
    """A dump with an entry of another form is refused: without the entry, the rank would seem late."""
    with pytest.raises(TorchProfError, match=r"1 of its 2 entries are of a form that is not known"):
        dump(0, entry(1) | damage, entry(2))


def test_hostile_groups(tmp_path):
    """Ranks of a group that are no text, however deep, are none."""
    path = tmp_path / "rank_0"
    config = {"0": {"desc": "default_pg", "ranks": shared(100)}, "1": {"ranks": 7}, "2": None}
    path.write_bytes(pickle.dumps({"version": "2", "pg_config": config, "entries": [entry(1, group="1")]}))
    assert read_dump(path, 0).sizes == {GroupKey("0", ""): 0, GroupKey("1", ""): 0}


def test_what_is_complete_is_so_without_a_time(dump):
    """A collective that the recorder calls completed counts as such, though no time was discovered."""
    found = dump(0, entry(1, time_created_ns=0, time_discovered_completed_ns=0))
    assert found.calls[0].completed_ns
    assert not found.calls[0].is_pending


def test_the_command_reads_folders(tmp_path, capsys):
    """Dumps in a folder are found among other files; without boxes they are enough."""
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(content(entry(1), *[entry(2, "started")][rank:], ranks="[0, 1]"))
        )
    (tmp_path / "checkpoint_rank_0").write_bytes(b"PK\x03\x04")
    assert not is_dump(tmp_path / "checkpoint_rank_0")
    assert cli.main(["autopsy", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 0 waits in all_reduce(float, 48 bytes) #2 of the default group" in out
    assert "for rank 1" in out
    assert cli.main(["autopsy", "--json", str(tmp_path)]) == 0
    found = checked("autopsy", capsys.readouterr().out)
    assert [each["has_box"] for each in found["ranks"]] == [False, False]
