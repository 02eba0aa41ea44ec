"""Files of ``otel-torchprof run`` where there are several ranks: whose they are, and who speaks."""

from __future__ import annotations

import fnmatch
import sys

import pytest
from chrome_files import events_in, slices

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.run_outputs import name_of_rank, of_last_attempt, pattern_of_ranks

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
THIRD = {"RANK": "2", "WORLD_SIZE": "4"}
ACTOR = {**THIRD, "TORCHELASTIC_RUN_ID": "x", "ROLE_NAME": "../actor", "TORCHELASTIC_RESTART_COUNT": "1"}
DEFAULT = {**THIRD, "TORCHELASTIC_RUN_ID": "x", "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("t.trace.json.gz", {}, "t.trace.json.gz"),
        ("t.trace.json.gz", ALONE, "t.trace.json.gz"),
        ("t.trace.json.gz", THIRD, "t.rank2.trace.json.gz"),
        ("t.trace.json.gz", DEFAULT, "t.rank2.trace.json.gz"),
        ("a.b/t.json", ACTOR, "a.b/t.rank2.___actor.restart1.json"),
        ("a.b/t.v2.otlp.gz", THIRD, "a.b/t.v2.rank2.otlp.gz"),
        ("t-{rank}.jsonl", ACTOR, "t-{rank}.jsonl"),
        ("t-{pid}.jsonl", THIRD, "t-{pid}.rank2.jsonl"),
    ],
)
def test_names(name, environ, expected):
    """A rank's file has its rank, its role and its restart before the suffixes, as far as there are some, and nothing of a path."""
    assert name_of_rank(name, environ) == expected


@pytest.mark.parametrize(
    ("name", "written", "is_found"),
    [
        ("t.trace.json.gz", "t.rank2.trace.json.gz", True),
        ("t.trace.json.gz", "t.rank2.trace.000001.json.gz", True),
        ("t.trace.json.gz", "t.trace.json.gz", False),
        ("t.trace.json.gz", "t2.rank2.trace.json.gz", False),
        ("[x].json", "[x].rank2.json", True),
        ("{rank}-{pid}.json", "3-4711.json", True),
        ("{rank}-x.json", "3-x.000000.json", True),
    ],
)
def test_patterns(name, written, is_found):
    """The pattern of a name finds what any rank writes under it, in one file or in several, and nothing that has another name."""
    assert fnmatch.fnmatchcase(written, pattern_of_ranks(name)) is is_found


def test_attempts():
    """Of ranks that were begun anew the files of the last attempt are explained, since two of one rank cannot be."""
    first, last = ["t.rank0.json", "t.rank1.json"], ["t.rank0.restart10.json", "t.rank1.restart10.json"]
    assert of_last_attempt([*first, "t.rank0.restart9.json", *last]) == last
    assert of_last_attempt(first) == first
    assert of_last_attempt([]) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_speaks(tmp_path, monkeypatch, capsys, rank):
    """Both write a file of their own; rank 0 says so and prints the table, rank 1 says nothing, as long as nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["otel-torchprof"])
    monkeypatch.setattr("sys.path", ["bin", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text("import otel_torchprof as otp\nwith otp.record_function('work'): pass\n")
    assert cli.main(["run", "--table", "train.py"]) == 0
    path = tmp_path / f"train.rank{rank}.trace.json.gz"
    assert [event["name"] for event in slices(events_in(path))] == ["work"]
    said = capsys.readouterr().err
    if rank:
        assert said == ""
    else:
        assert f"wrote {path}; this is rank 0 of 2, and each writes its own\n" in said
        assert "Self CPU time total" in said
