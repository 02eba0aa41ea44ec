"""Which rank hung, and where: conclusions from made contents of boxes, and the text and the JSON that say them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rank_boxes import (
    ALL_REDUCE,
    BROADCAST,
    DEFAULT,
    NOW,
    PENDING,
    UNTRACKED,
    call,
    lines,
    roll_call,
    state,
    without_times,
)

from otel_torchprof._answers.autopsy import autopsy, described
from otel_torchprof._cli.autopsy import as_json, as_text
from otel_torchprof._files.rank_state import GroupKey

if TYPE_CHECKING:
    from otel_torchprof._native.blackbox import Collective

# ---- who waits, and for whom ----


def test_a_rank_that_has_not_come():
    """Those that are in the first collective that is not complete wait, those that have not enqueued it are absent, and where those are is said."""
    states = [
        state(0, call(5), call(6, PENDING), size=3),
        state(1, call(5), size=3, place="load_batch"),
        state(2, call(5), call(6, PENDING, enqueued_ns=NOW + 5), size=3),
    ]
    found = autopsy(states)
    (wait,) = found.waits
    assert (wait.group, wait.sequence_nr, wait.status) == (DEFAULT, 6, PENDING)
    assert (wait.waiting, wait.absent, wait.since_ns) == ((0, 2), (1,), NOW + 5)
    assert (found.culprits, found.cycle, found.missing, found.dead) == ([1], [], [], [])
    first, second = lines(*states)
    where = "all_reduce(sum, float, 4,000 bytes) #6 of the default group"
    assert without_times(first) == f"ranks 0, 2 wait in {where} since T, for rank 1"
    assert second == "rank 1 is in load_batch for 3.0 s"
    assert roll_call(*states) == [f"ranks 0, 2: in {where}, not complete", "rank 1: in load_batch"]


def test_a_rank_that_waits_alone():
    """One rank waits for all others, which are in different places: each place is said once, with its ranks."""
    states = [
        state(0, call(1, PENDING)),
        state(1, place="load_batch"),
        state(2, place="load_batch"),
        state(3, place="save"),
    ]
    assert [without_times(line) for line in lines(*states)] == [
        "rank 0 waits in all_reduce(sum, float, 4,000 bytes) #1 of the default group since T, for ranks 1-3",
        "ranks 1, 2 are in load_batch for at least 3.0 s",
        "rank 3 is in save for 3.0 s",
    ]


def test_the_first_number_counts():
    """Of several collectives that are not complete the first is what a rank waits in; who is only in later ones is not behind."""
    found = autopsy([state(0, call(6, PENDING), call(7, PENDING), size=2), state(1, call(6), call(7, PENDING), size=2)])
    (wait,) = found.waits
    assert (wait.sequence_nr, wait.waiting, wait.absent) == (6, (0,), ())
    assert found.culprits == []


def test_all_are_there():
    """Where every rank is in the same collective nobody is absent, and none is said to be waited for."""
    states = [state(rank, call(6, PENDING), size=2) for rank in range(2)]
    found = autopsy(states)
    assert [(wait.waiting, wait.absent) for wait in found.waits] == [((0, 1), ())]
    assert found.culprits == []
    assert without_times(lines(*states)[0]).endswith(" #6 of the default group since T")


def test_all_is_complete():
    """Ranks that have completed all that they have enqueued wait for nobody, however much more one of them has enqueued."""
    states = [state(0, call(5), call(6), size=2), state(1, call(5), size=2)]
    found = autopsy(states)
    assert (found.waits, found.mismatches, found.cycle, found.culprits) == ([], [], [], [])
    assert lines(*states) == ["no rank is known to wait for another"]
    assert roll_call(*states) == ["ranks 0, 1: in no recorded event"]


def test_a_rank_without_a_box():
    """Of a rank of the group of which there is no box nothing is said but that; likewise of ranks that only the launcher knows of."""
    states = [state(rank, call(6, PENDING)) for rank in (0, 1, 3)]
    found = autopsy(states)
    assert ([wait.absent for wait in found.waits], found.culprits, found.missing) == ([()], [], [2])
    assert lines(*states)[1:] == ["there is no box of rank 2"]
    before_all_groups = [state(0, info={"world_size": 4}), state(1, info={"world_size": 4})]
    assert autopsy(before_all_groups).missing == [2, 3]


def test_a_group_of_which_a_rank_does_not_know():
    """A rank that has enqueued nothing in a group, or nothing at all, has not come to the group's first collective."""
    pair = GroupKey("1", "0,2")
    found = autopsy(
        [state(0, call(1, PENDING, group=pair), size=3), state(1, call(3), size=3), state(2, call(3), size=3)]
    )
    assert [(wait.group, wait.waiting, wait.absent) for wait in found.waits] == [(pair, (0,), (2,))]
    assert found.culprits == [2]
    states = [state(0, call(1, PENDING), size=2), state(1)]
    assert autopsy(states).culprits == [1]
    assert lines(*states)[1] == "rank 1 is in no recorded event"


def test_a_group_for_which_the_box_has_no_slot():
    """Groups beyond those that a box counts are known by their collectives: who is in one, and who has come to it and on."""
    late = GroupKey("99", "0,1")
    states = [
        state(0, call(4, PENDING, group=late)),
        state(1, call(4, group=late), call(5, group=late)),
        state(2, call(1)),
    ]
    states = [
        each._replace(groups={key: group for key, group in each.groups.items() if key != late}) for each in states
    ]
    assert [(wait.group, wait.waiting, wait.absent) for wait in autopsy(states).waits] == [(late, (0,), ())]


def test_a_chain_is_no_cycle():
    """Ranks that wait each for the next one in groups of two, up to one that waits for nobody: that one is the culprit."""
    pairs = [GroupKey(str(at + 1), f"{at},{at + 1}") for at in range(3)]
    states = [state(at, call(1, PENDING, group=pair)) for at, pair in enumerate(pairs)]
    found = autopsy([*states, state(3, place="save")])
    assert (found.cycle, found.culprits) == ([], [3])


def test_a_net_of_waits_is_no_cycle():
    """Each of forty layers of two ranks waits for both of the next one: a search that went every way would never end."""
    groups = {
        (layer, at): GroupKey(f"{layer}.{at}", f"{2 * layer + at},{2 * layer + 2},{2 * layer + 3}")
        for layer in range(40)
        for at in range(2)
    }
    waiting = [state(2 * layer + at, call(1, PENDING, group=group)) for (layer, at), group in groups.items()]
    found = autopsy([*waiting, state(80), state(81)])
    assert (found.cycle, found.culprits) == ([], [80, 81])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_cycle_of_groups(order):
    """Ranks that each wait for another, round in a circle, are named from the lowest on; others that wait for them are no part of it."""
    members = dict(zip((5, 6, 7), order, strict=True))
    groups = [GroupKey(str(at), f"{at},{after}") for at, after in ((0, 1), (1, 2), (2, 0))]
    waiting = [state(at, call(1, PENDING, group=groups[at])) for at in members.values()]
    outside = state(3, call(1, PENDING, group=GroupKey("9", "1,3")))
    found = autopsy([*waiting, outside])
    assert (found.cycle, found.culprits) == ([0, 1, 2], [])
    assert lines(*waiting, outside)[0] == (
        "cycle: rank 0 waits for rank 1, which waits for rank 2, which waits for rank 0"
    )


def test_two_groups_that_two_ranks_enter_in_different_order():
    """The shortest cycle there is: each rank is in a group that the other one has not come to."""
    groups = [GroupKey("1", "0,1"), GroupKey("2", "0,1")]
    found = autopsy([state(rank, call(1, PENDING, group=groups[rank])) for rank in range(2)])
    assert (found.cycle, len(found.waits)) == ([0, 1], 2)


def test_a_long_cycle_is_cut_in_the_text():
    """Of a cycle of fifty ranks the first sixteen are named, and all are in the JSON."""
    groups = [GroupKey(str(at), f"{at},{(at + 1) % 50}") for at in range(50)]
    found = autopsy([state(at, call(1, PENDING, group=group)) for at, group in enumerate(groups)])
    said = as_text(found).splitlines()
    assert said[0].endswith("waits for rank 15, and so on over 50 ranks")
    assert said[17] == "... and 34 more like that: see --json"
    assert as_json(found)["cycle"] == list(range(50))


# ---- ranks that call different things ----


def calls_of(text: str, first: int = 6) -> list[Collective]:
    """Collectives that nobody has completed: ``a`` all-reduces, ``b`` broadcasts."""
    return [call(first + at, PENDING, {"a": ALL_REDUCE, "b": BROADCAST}[each]) for at, each in enumerate(text)]


@pytest.mark.parametrize(
    ("usual", "other", "kind"),
    [
        ("ab", "b", "skipped"),
        ("ab", "ba", "reordered"),
        ("abab", "bab", "skipped"),
        ("abb", "bab", "reordered"),
        ("abab", "babab", "added"),
        ("a", "ba", "added"),
        ("aab", "bb", "mismatched"),
        ("a", "b", "mismatched"),
    ],
)
def test_what_a_rank_has_done_otherwise(usual, other, kind):
    """A rank that left a collective out, made one more or swapped two is told from one that called something else, by all that came after."""
    states = [state(rank, *calls_of(other if rank == 1 else usual), size=3) for rank in range(3)]
    (found,) = autopsy(states).mismatches
    assert (found.group, found.sequence_nr, found.kind) == (DEFAULT, 6, kind)
    assert [ranks for _, ranks in found.calls] == [(0, 2), (1,)]
    names = ["all_reduce(sum, float, 4,000 bytes)", "broadcast(float, 4,000 bytes, root 0)"]
    assert [text for text, _ in found.calls] == (names if usual[0] == "a" else names[::-1])
    assert lines(*states)[0] == (
        f"{kind}: collective #6 of the default group: ranks 0, 2 called {names[0]}; rank 1 called {names[1]}"
    )


def test_of_two_ranks_nobody_knows_which_is_right():
    """One of two ranks has a collective that the other has not: it may have been left out by the one, or added by the other."""
    for texts in (("ab", "b"), ("b", "ab")):
        (found,) = autopsy([state(rank, *calls_of(text), size=2) for rank, text in enumerate(texts)]).mismatches
        assert found.kind == "skipped"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "c10d::reduce_scatter_"},
        {"bytes_in": 40},
        {"dtype": "int"},
        {"reduce_op": "max"},
        {"name": BROADCAST, "reduce_op": "", "root": 1},
    ],
)
def test_what_all_ranks_have_to_agree_on(change):
    """Ranks differ by name, size, type, operation or root of a collective of which they have come to the same number."""
    usual = {"name": BROADCAST, "reduce_op": "", "root": 0} if "root" in change else {}
    states = [state(rank, call(6, PENDING, **{**usual, **(change if rank == 2 else {})}), size=3) for rank in range(3)]
    found = autopsy(states)
    assert [(each.kind, [ranks for _, ranks in each.calls]) for each in found.mismatches] == [
        ("mismatched", [(0, 1), (2,)])
    ]
    assert found.waits == []  # said already
    assert described(call(6, **usual)) != described(call(6, **{**usual, **change}))


@pytest.mark.parametrize("name", ["c10d::allgather_", "c10d::alltoall_base_", "c10d::gather_", "c10d::scatter_"])
def test_sizes_that_may_differ(name):
    """Collectives to which ranks may bring different sizes are the same ones whatever these are."""
    found = autopsy([state(rank, call(6, PENDING, name, bytes_in=rank), size=2) for rank in range(2)])
    assert found.mismatches == []


def test_numbers_that_only_one_rank_still_knows():
    """A box has the last collectives only: what the others do not know is not compared."""
    states = [state(0, call(5, name=BROADCAST), call(6, PENDING), size=2), state(1, call(6, PENDING), size=2)]
    assert autopsy(states).mismatches == []


def test_coalesced_collectives_are_not_compared():
    """Several collectives may have one number, and a box may have lost the first of them: they are no mismatch, and the pending one counts."""
    both = [call(6, name=BROADCAST), call(6, PENDING)]
    found = autopsy([state(0, *both, size=2), state(1, call(6, PENDING), size=2)])
    assert (found.mismatches, [wait.waiting for wait in found.waits]) == ([], [(0, 1)])
    complete = [call(6, name=BROADCAST), call(6)]
    assert autopsy([state(0, *complete, size=2), state(1, *complete[1:], size=2)]).mismatches == []


def test_a_mismatch_and_a_rank_that_is_not_there():
    """Both are said: which ranks differ, and that others have not come to that number."""
    states = [state(0, *calls_of("a"), size=3), state(1, *calls_of("b"), size=3), state(2, call(5), size=3)]
    found = autopsy(states)
    assert (len(found.mismatches), found.culprits) == (1, [2])
    assert [wait.absent for wait in found.waits] == [(2,)]


# ---- backends that do not say what is complete ----


def test_an_untracked_backend_says_only_who_is_late():
    """Nobody is said to wait: the ranks that have enqueued less than others have not come, and their places are said."""
    states = [
        state(0, call(5, UNTRACKED), call(6, UNTRACKED), call(7, UNTRACKED), size=3),
        state(1, call(5, UNTRACKED), size=3, place="load_batch"),
        state(2, call(5, UNTRACKED), call(6, UNTRACKED), size=3),
    ]
    found = autopsy(states)
    (wait,) = found.waits
    assert (wait.status, wait.sequence_nr, wait.waiting, wait.absent) == ("enqueued", 6, (0, 2), (1,))
    assert [without_times(line) for line in lines(*states)] == [
        "rank 1 has not come to all_reduce(sum, float, 4,000 bytes) #6 of the default group, which ranks 0, 2 enqueued at T",
        "rank 1 is in load_batch for 3.0 s",
    ]
    said = as_text(found)
    assert not any(word in said for word in ("wait", "complete", "pending"))


def test_untracked_ranks_that_are_level():
    """Ranks that have enqueued as much as the others are not late, and nothing is known to be complete or not."""
    states = [state(rank, call(5, UNTRACKED), size=2) for rank in range(2)]
    assert autopsy(states).waits == []
    assert lines(*states) == ["no rank is known to wait for another"]
    assert roll_call(*states) == ["ranks 0, 1: in no recorded event"]


def test_untracked_ranks_in_a_circle_are_no_cycle():
    """Each of three ranks is ahead of the next in a group of two, which does not say that it waits for it."""
    groups = [GroupKey(str(at), ",".join(map(str, sorted((at, (at + 1) % 3))))) for at in range(3)]
    found = autopsy([state(at, call(1, UNTRACKED, group=group)) for at, group in enumerate(groups)])
    assert (found.cycle, len(found.waits)) == ([], 3)


def test_an_untracked_rank_that_has_not_begun():
    """A rank of the group that has enqueued nothing is behind, and what the others have enqueued since may be known no more."""
    states = [state(0, call(900, UNTRACKED), size=2), state(1, size=2)]
    (wait,) = autopsy(states).waits
    assert (wait.sequence_nr, wait.call, wait.absent, wait.since_ns) == (1, "a collective", (1,), 0)
    assert lines(*states)[0] == "rank 1 has not come to a collective #1 of the default group, which rank 0 enqueued"
