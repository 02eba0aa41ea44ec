"""What is recorded of collectives over gloo, by four ranks under torchrun. All tests look at one run of collective_program.py."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from collective_program import LATE_RANK, LATE_STEP, LAYOUTS, STEPS
from jsonl_exporter import read
from launched import launched

RANKS = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the ranks have written."""
    folder = tmp_path_factory.mktemp("collectives")
    done = launched("collective_program", folder)
    # gloo itself aborts now and then where it ends after a monitored barrier; by then all is written.
    written = [folder / f"{rank}.json" for rank in RANKS]
    assert all(path.exists() for path in written), done.stderr
    return folder


@pytest.fixture(scope="module")
def reported(folder):
    """By rank and step, the collectives."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


def numbered(entries):
    """Group, number and name of what is numbered."""
    return [(e["group"], e["sequence_nr"], e["name"]) for e in entries if e["sequence_nr"] >= 0]


def test_numbers_are_the_same_on_every_rank(reported):
    """Whoever records a step has the same numbers in it, whatever only some ranks sent or received before."""
    for step in range(STEPS):
        whole = [
            [entry for entry in numbered(reported[rank][step]) if entry[0] == "0"]
            for rank in RANKS
            if rank != LATE_RANK or step >= LATE_STEP
        ]
        assert whole[0]
        assert all(entries == whole[0] for entries in whole)


def test_numbers_rise_and_none_comes_twice(reported):
    """Each collective of a group has a number of its own, and a later one a higher one."""
    for rank in RANKS:
        numbers = [entry[1] for step in reported[rank] for entry in numbered(step) if entry[0] == "0"]
        assert numbers == sorted(set(numbers))


def test_every_kind_is_there(reported):
    """A step has the collectives that the program has made, DistributedDataParallel's on autograd's thread among them."""
    names = Counter(entry["name"] for entry in reported[0][STEPS - 1])
    expected = ["broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "scatter", "gather", "send"]
    assert names == {**dict.fromkeys(expected, 1), "all_reduce": 4, "barrier": 2}


def test_a_sub_group_has_numbers_and_ranks_of_its_own(reported):
    """Its members agree on its numbers, and know which ranks of the world they are."""
    of_pair = {rank: [e for e in reported[rank][LATE_STEP] if e["group"] != "0"] for rank in RANKS}
    assert [len(entries) for entries in of_pair.values()] == [0, 1, 0, 1]
    (one,), (other,) = of_pair[1], of_pair[LATE_RANK]
    assert (one["sequence_nr"], one["group"]) == (other["sequence_nr"], other["group"])
    assert (one["ranks"], one["group_size"], one["rank"], other["rank"]) == (f"1,{LATE_RANK}", 2, 0, 1)


def test_info_of_a_collective(reported):
    """Bytes, types, the operation that reduces, the root and the peer are those of the call."""
    by_name = {}
    for entry in reported[1][0]:
        by_name.setdefault(entry["name"], entry)
    keys = ("bytes_in", "bytes_out", "dtype", "reduce_op", "root", "peer", "tag", "flags", "backend")
    assert {name: tuple(by_name[name][key] for key in keys) for name in ("all_reduce", "broadcast", "all_gather")} == {
        "all_reduce": (16, 16, "float", "max", -1, -1, -1, 0, "gloo"),
        "broadcast": (16, 16, "float", "", 2, -1, -1, 0, "gloo"),
        "all_gather": (16, 64, "float", "", -1, -1, -1, 0, "gloo"),
    }
    assert tuple(by_name["recv"][key] for key in keys) == (0, 12, "float", "", -1, 0, 5, 1, "gloo")
    assert tuple(by_name["barrier"][key] for key in keys) == (0, 0, "", "", -1, -1, -1, 0, "gloo")
    assert [entry["flags"] for entry in reported[1][0] if entry["dtype"] == "double"] == [2]


def what(step, span):
    """What the spans of one collective have in common, whichever rank's they are."""
    info = {key.removeprefix("torch.collective."): value for key, value in span["attributes"].items()}
    ways = [info["rank"], info.get("peer")] if info["name"] in {"send", "recv"} else []
    name = "transfer" if ways else info["name"]
    return step, info["group"], info["sequence_nr"], name, *sorted(ways)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_links_to_that_of_every_peer(folder, layout):
    """Each span of a collective, of DistributedDataParallel's too, links to exactly the other ranks' spans of it, which are there."""
    together = {}
    for spans in read(folder / layout).values():
        by_id = {span["span"]: span for span in spans}
        assert len(by_id) == len(spans)
        for span in spans:
            # What is inside of a collective hangs under the id that the others know.
            assert span["parent"] == 0 or span["parent"] in by_id or span["name"] == "torch.step"
            if "torch.collective.name" not in span["attributes"]:
                continue
            top = span
            while top["name"] not in {"torch.step", "torch.setup"}:
                top = by_id[top["parent"]]
            together.setdefault(what(top["attributes"].get("torch.step.number", -1), span), []).append(span)
    sizes = Counter()
    for key, spans in together.items():
        members = 2 if key[3] == "transfer" else spans[0]["attributes"]["torch.collective.group_size"]
        assert len(spans) == members, key
        ends = [[span["trace"], span["span"]] for span in spans]
        for span, own in zip(spans, ends, strict=True):
            assert sorted(span["links"]) == sorted(end for end in ends if end != own), key
        sizes[members] += 1
    assert sizes == {4: 13 * STEPS, 2: 2 * STEPS}
