"""Autopsies of what is seldom: failed collectives, sends and receives, several runs in a folder, damaged boxes."""

from __future__ import annotations

import json

import pytest
from checked_json import checked
from rank_boxes import (
    BROADCAST,
    DEFAULT,
    DONE,
    FAILED,
    NOW,
    PENDING,
    SECOND,
    call,
    lines,
    roll_call,
    state,
    transfer,
    without_times,
)

from otel_torchprof._answers.autopsy import autopsy
from otel_torchprof._cli.autopsy import _running, as_json, as_text, in_a_line, ranks_text
from otel_torchprof._files.rank_state import GroupKey, of_one_run

# ---- what failed, and who died ----


def test_a_collective_that_failed():
    """Ranks whose collective failed do not wait, and did not complete it: who had not come to it, and where that is, is said."""
    states = [
        state(0, call(5), call(6, FAILED), size=3, place="cleanup"),
        state(1, call(5), size=3, is_alive=False, place="save_checkpoint"),
        state(2, call(5), call(6, FAILED), size=3, place="cleanup"),
    ]
    found = autopsy(states)
    (wait,) = found.waits
    assert (wait.status, wait.waiting, wait.absent) == ("failed", (0, 2), (1,))
    assert (found.culprits, found.cycle, [each.rank for each in found.dead]) == ([1], [], [1])
    where = "all_reduce(sum, float, 4,000 bytes) #6 of the default group"
    assert [without_times(line) for line in lines(*states)] == [
        f"{where} failed on ranks 0, 2; rank 1 has not come to it",
        "rank 1 does not run any more; last seen at T in save_checkpoint",
    ]
    assert roll_call(*states) == [
        f"ranks 0, 2: in cleanup; {where} failed",
        "rank 1: not running any more, last in save_checkpoint",
    ]


def test_a_failure_that_the_program_survived():
    """A collective that failed before others were completed is nothing to be said."""
    states = [state(rank, call(5, FAILED), call(6), size=2) for rank in range(2)]
    assert autopsy(states).waits == []
    assert lines(*states) == ["no rank is known to wait for another"]


def test_some_fail_and_others_still_wait():
    """In one collective some ranks have an error and others wait: both are said, and who is absent is the culprit of both."""
    states = [state(0, call(6, FAILED), size=3), state(1, call(5), size=3), state(2, call(6, PENDING), size=3)]
    found = autopsy(states)
    assert sorted((wait.status, wait.waiting) for wait in found.waits) == [("failed", (0,)), ("pending", (2,))]
    assert found.culprits == [1]


def test_failures_make_no_cycle():
    """Ranks whose collectives failed for want of one another wait for each other no more."""
    groups = [GroupKey("1", "0,1"), GroupKey("2", "0,1")]
    assert autopsy([state(rank, call(1, FAILED, group=groups[rank])) for rank in range(2)]).cycle == []


def test_a_rank_that_ended_its_box():
    """It has not died; where others wait for it, that is said, with its last place."""
    states = [
        state(0, call(6, PENDING), size=2),
        state(1, call(5), size=2, is_alive=False, is_closed=True, place="save"),
    ]
    found = autopsy(states)
    assert (found.dead, found.culprits) == ([], [1])
    assert without_times(lines(*states)[1]) == "rank 1 has ended the box; last seen at T in save"
    assert roll_call(*states)[1] == "rank 1: box ended, last in save"


def test_nobody_runs_any_more():
    """In boxes of processes that are all gone, as copies from other machines are, only those that others wait for have a line of their own."""
    states = [
        *(state(rank, call(6, PENDING), size=3, is_alive=False) for rank in (0, 2)),
        state(1, call(5), size=3, is_alive=False, place="save"),
    ]
    for each in (states, [*states[1:], states[0]._replace(is_closed=True)]):
        first, second = (without_times(line) for line in lines(*each))
        assert first.endswith("since T, for rank 1")
        assert second == "rank 1 does not run any more; last seen at T in save"
    alone = state(0, is_alive=False, place="save")
    assert [without_times(line) for line in lines(alone)] == [
        "rank 0 does not run any more; last seen at T in save",
        "no rank is known to wait for another",
    ]


# ---- sends and receives ----


def test_a_receive_that_nobody_answers():
    """The rank waits for its peer, which counts in the group and is said as a rank of the run; others wait for the first in a collective."""
    pair = GroupKey("4", "1,2")
    states = [
        state(0, call(6, PENDING), size=3),
        state(1, call(5), transfer(1, group=pair), size=3),
        state(2, call(5), size=3, place="load_batch"),
    ]
    found = autopsy(states)
    assert [(each.rank, each.peer, each.more) for each in found.transfers] == [(1, 2, 0)]
    assert (found.cycle, found.culprits) == ([], [2])
    assert without_times(lines(*states)[1]) == "rank 1 waits in recv from rank 2 (tag 7) of group 4 since T"
    assert "rank 1: in recv from rank 2 (tag 7) of group 4, not complete" in roll_call(*states)


def test_a_receive_and_a_collective_in_a_circle():
    """A rank receives from one that waits for it in a collective."""
    states = [state(0, call(5), transfer(1), size=2), state(1, call(6, PENDING), size=2)]
    assert autopsy(states).cycle == [0, 1]


def test_receives_before_the_first_collective():
    """Who the peer is, is known from the group of the sends and receives alone."""
    found = autopsy([state(0, transfer(1), size=2), state(1, place="save")])
    assert (found.transfers[0].peer, found.culprits) == (1, [1])
    assert lines(state(0, transfer(1), size=2)) == [
        *lines(state(0, transfer(1), size=2))[:1],
        "there is no box of rank 1",
    ]


def test_a_receive_from_any_rank():
    """It waits for nobody in particular."""
    states = [state(0, transfer(-1, name="c10d::recv_any_source_"), size=2), state(1, transfer(0, DONE), size=2)]
    assert autopsy(states).culprits == []
    assert without_times(lines(*states)[0]) == "rank 0 waits in recv from any rank (tag 7) of the default group since T"


def test_many_transfers_of_one_rank():
    """The oldest is said, and how many others there are."""
    calls = [transfer(1, name="c10d::send", enqueued_ns=NOW + at * SECOND) for at in range(5)]
    (line, *_) = lines(state(0, *calls, size=2))
    assert without_times(line) == "rank 0 waits in send to rank 1 (tag 7) of the default group, and 4 more since T"


def test_transfers_that_failed():
    """One that failed after the last complete one is said, with its peer as the culprit; one before it is not."""
    states = [state(0, transfer(1, DONE), transfer(1, FAILED), size=2), state(1, is_alive=False, place="save")]
    assert lines(*states)[0] == "recv from rank 1 (tag 7) of the default group failed on rank 0"
    assert autopsy(states).culprits == [1]
    assert autopsy([state(0, transfer(1, FAILED), transfer(1, DONE), size=2)]).transfers == []


# ---- ranks, groups and runs ----


def test_of_several_boxes_of_a_rank_the_latest_counts():
    """A rank that was begun anew has two boxes, whose lives do not overlap: the dead one's says nothing."""
    old = state(1, call(5), size=2, is_alive=False, last_ns=NOW - 120 * SECOND, info={"opened": NOW - 180 * SECOND})
    states = [old, state(1, call(6, PENDING), size=2), state(0, call(6, PENDING), size=2)]
    for each in (states, states[::-1]):
        found = autopsy(each)
        assert [(rank.rank, rank.is_alive) for rank in found.ranks] == [(0, True), (1, True)]
        assert [wait.waiting for wait in found.waits] == [(0, 1)]
        assert found.ambiguous == []
    before_its_first = state(1, info={"opened": NOW - 60 * SECOND})
    assert [rank.is_alive for rank in autopsy([old, before_its_first]).ranks] == [True]


def test_a_child_process_has_the_rank_of_its_parent():
    """A loader's worker inherits the variables of its rank, lives beside it and communicates with nobody: its box does not stand for the rank."""
    parent = state(1, call(6, PENDING), size=2)
    child = state(1, info={"opened": NOW - 10 * SECOND})
    for each in ([parent, child], [child, parent]):
        found = autopsy([state(0, call(6, PENDING), size=2), *each])
        assert [wait.waiting for wait in found.waits] == [(0, 1)]
        assert found.ambiguous == []
    dead = state(1, call(5), size=2, is_alive=False)
    assert [each.rank for each in autopsy([dead, child]).dead] == [1]


def test_two_runs_at_once():
    """Where two processes that run and communicate have the same rank, it is said that the boxes are of several runs."""
    states = [state(0, call(6), size=2), state(0, call(9), size=2, info={"opened": NOW - 10 * SECOND})]
    assert autopsy(states).ambiguous == [0]
    assert lines(*states)[0] == "several living processes say that they are rank 0: name the boxes of one run"


def test_boxes_of_earlier_runs():
    """Of a folder with boxes of several runs those count that are of the one that lives, by the run's id, its restarts, its size and its time."""
    run = {"run_id": "b", "restart": 1, "world_size": 2}
    living = [state(rank, call(6, PENDING), size=2, info=run) for rank in range(2)]
    others = [
        state(0, call(5), size=2, is_alive=False, info={**run, "run_id": "a"}),
        state(1, call(5), size=2, is_alive=False, info={**run, "restart": 0}),
        state(3, call(5), is_alive=False, info={**run, "world_size": 4}),
        state(1, call(5), size=2, is_alive=False, info={**run, "opened": 5}, last_ns=NOW - 3600 * SECOND),
    ]
    assert of_one_run([*others, *living]) == (living, others)
    dead = [state(0, call(6), size=2, is_alive=False, info=run), living[1]]
    assert of_one_run(dead) == (dead, [])


def test_of_runs_that_are_all_over_the_last_counts():
    """Where nothing runs any more it is the run that was seen last; processes without ranks are no run."""
    old = [state(rank, call(1), is_alive=False, info={"run_id": "a"}, last_ns=NOW - 5) for rank in range(2)]
    new = [state(rank, call(1), is_alive=False, info={"run_id": "b"}) for rank in range(2)]
    alone = state(None, is_alive=False, last_ns=NOW + 5)
    assert of_one_run([*new, alone, *old])[0] == new
    assert of_one_run([]) == ([], [])


def test_a_rank_that_the_launcher_did_not_tell():
    """Programs that start their ranks themselves need no variables for it: a group says which rank the process is."""
    states = [state(0, call(6, PENDING), size=2, info={"rank": None}), state(1, call(5), size=2)]
    pair = GroupKey("1", "4,7")
    assert [each.rank for each in states] == [0, 1]
    assert state(7, call(1, group=pair), info={"rank": None}).rank == 7
    assert state(1, call(6), size=2, info={"rank": "1"}).rank == 1


def test_a_rank_that_nobody_tells():
    """A process that tells no rank and is in no group is called by its number, and is no rank of anything."""
    unknown = state(None, place="setup")
    found = autopsy([state(0, call(6, PENDING), size=2), unknown])
    assert (found.missing, found.culprits) == ([1], [])
    assert "process 1000: in setup" in as_text(found)
    assert [each["rank"] for each in as_json(found)["ranks"]] == [None, 0]


def test_groups_whose_ranks_the_backend_was_not_told():
    """The default group has all ranks; of another without a list only the ranks are known that have a box of it, by their ranks there."""
    named = GroupKey("2", "")
    of_pair = {rank: state(rank, call(1, PENDING, group=named), transfer(1, group=named)) for rank in (1, 3)}
    states = []
    for place, (rank, each) in enumerate(of_pair.items()):
        small = {key: group._replace(size=2, rank=place) for key, group in each.groups.items()}
        states.append(each._replace(rank=rank, groups=small, transfer_groups=small))
    states += [state(rank, call(5)) for rank in (0, 2)]
    found = autopsy(states)
    assert [(wait.group.text, wait.waiting, wait.absent) for wait in found.waits] == [("group 2", (1, 3), ())]
    assert [each.peer for each in found.transfers] == [3, 3]
    assert (found.missing, DEFAULT.text) == ([], "the default group")


@pytest.mark.parametrize("ranks", ["0,x", "0,1,", "٣,4", f"0,{'9' * 5000}", "-1,0"])
def test_damaged_groups(ranks):
    """Lists that are none, ranks and sizes that cannot be: nothing is concluded from them, and nothing large is made."""
    damaged = GroupKey("1", ranks)
    found = state(0, call(1, PENDING, group=damaged), call(2, PENDING))
    huge = {key: group._replace(size=2**31 - 1, rank=-5) for key, group in found.groups.items()}
    result = autopsy([found._replace(groups=huge, run=found.run._replace(world_size=2**40))])
    assert result.missing == []
    assert as_text(result)


def test_thousands_of_ranks():
    """Of two thousand ranks in a thousand groups the one that has not come is found, and the text stays short."""
    size = 2000
    pairs = [GroupKey(str(rank // 2 + 1), f"{rank // 2 * 2},{rank // 2 * 2 + 1}") for rank in range(size)]
    states = [
        state(rank, *(call(at) for at in range(20)), call(3, group=pairs[rank]), call(20, PENDING), size=size)
        for rank in range(size)
    ]
    states[1234] = state(1234, call(19), call(3, group=pairs[1234]), size=size, place="load_batch")
    found = autopsy(states)
    assert (found.culprits, found.missing, found.mismatches, found.cycle) == ([1234], [], [], [])
    assert lines(*states)[1:] == ["rank 1234 is in load_batch for 3.0 s"]
    assert ", for rank 1234" in lines(*states)[0]
    assert len(as_text(found)) < 1000


def test_thousands_of_dead_ranks():
    """Ranks that died in the same place have one line, with all of their numbers."""
    states = [state(rank, is_alive=rank == 0, place="forward") for rank in range(2000)]
    assert [without_times(line) for line in lines(*states)] == [
        "ranks 1-1999 do not run any more; last seen at T in forward",
        "no rank is known to wait for another",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((1,), "rank 1"),
        ((0, 1), "ranks 0, 1"),
        ((7, 0, 2, 3, 4, 5, 6), "ranks 0, 2-7"),
        ((0, 2, 4), "ranks 0, 2, 4"),
        (range(4096), "ranks 0-4095"),
    ],
)
def test_ranks_in_words(ranks, text):
    """Runs of three or more are a range, in order."""
    assert ranks_text(tuple(ranks)) == text


# ---- JSON, names, and the command ----


def test_the_json():
    """It is valid, has numbers for ranks and times, and all that the text is made of."""
    states = [
        state(0, call(5), call(6, PENDING), transfer(1), size=3),
        state(1, call(5), call(6, PENDING, BROADCAST), size=3),
        state(None, is_alive=False),
    ]
    found = checked("autopsy", json.dumps(as_json(autopsy(states))))
    assert [each["kind"] for each in found["mismatches"]] == ["mismatched"]
    assert found["missing"] == [2]
    assert (found["transfers"][0]["rank"], found["transfers"][0]["peer"], found["transfers"][0]["tag"]) == (0, 1, 7)
    assert [(each["rank"], each["alive"], each["pid"]) for each in found["ranks"]] == [
        (None, False, 1000),
        (0, True, 1000),
        (1, True, 1001),
    ]
    assert found["ranks"][1]["groups"][0]["last_enqueued"] == 6


def test_names_cannot_forge_the_text():
    """Control characters and line feeds in labels and in the names of groups are escapes."""
    forged = GroupKey("1\nrank 9: dead\x1b[2J", "0,1")
    said = as_text(autopsy([state(0, call(1, PENDING, group=forged)), state(1, place="a\nrank 8: dead")]))
    assert "\x1b" not in said
    assert not [line for line in said.splitlines() if line.startswith(("rank 8", "rank 9"))]


@pytest.mark.parametrize(
    ("known", "comes"),
    [
        ({"active_ns": NOW + 99 * SECOND}, True),
        ({"active_ns": NOW}, False),
        ({"active_ns": NOW, "place": "save_checkpoint"}, True),
        ({"active_ns": NOW - 1000 * SECOND, "place": "save_checkpoint"}, False),
        ({"active_ns": NOW + 99 * SECOND, "is_hung": True}, False),
        ({"active_ns": NOW, "is_hung": True, "is_held": True}, True),
        ({"active_ns": NOW + 99 * SECOND, "is_alive": False}, False),
        ({"active_ns": NOW + 99 * SECOND, "is_closed": True}, False),
    ],
)
def test_ranks_that_may_still_come(known, comes):
    """A rank that others wait for may come if it moved within the limit, is in something that takes long, or is held by a debugger."""
    states = [state(0, call(6, PENDING), size=2), state(1, call(5), size=2)._replace(**known)]
    assert [each.rank for each in _running(autopsy(states), 60)] == ([1] if comes else [])


def test_the_line_of_a_hang():
    """It names first the rank that others wait for, with its place and the kernel's kills, and one that waits for nobody by itself."""
    states = [
        state(0, call(6, PENDING), size=2),
        state(1, call(5), size=2, is_alive=False, place="save")._replace(killed=1, last_ended="step"),
    ]
    assert without_times(in_a_line(states[0], autopsy(states))) == (
        "rank 1 does not run any more; the kernel has killed 1 process of its cgroup for lack of memory; last seen at T in save; "
        "rank 0 waits in all_reduce(sum, float, 4,000 bytes) #6 of the default group since T, for rank 1"
    )
    alone = state(0, place="load")
    assert in_a_line(alone, autopsy([alone])) == "rank 0 is in load for 3.0 s"
