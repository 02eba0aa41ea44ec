"""Files of ``otel-torchprof run`` where there are several ranks: whose they are, and who speaks."""

from __future__ import annotations

import fnmatch
import sys

import grpc
import pytest
from chrome_files import events_in, slices
from fault_server import Abort, GrpcReceiver

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.run_outputs import name_of_rank, of_last_attempt, pattern_of_ranks
from otel_torchprof._export.from_environment import exporters_from_environment

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


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder with a script, to run it within this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["otel-torchprof"])
    monkeypatch.setattr("sys.path", ["bin", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text("import otel_torchprof as otp\nwith otp.record_function('work'): pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["-o", "otlp", "--endpoint", "{given}"], "given"),
        (["--endpoint", "{given}", "-o", "otlp", "-o", "otlp", "-o", "t.json", "-o", "./t.json"], "given"),
        (["--endpoint", "{given}", "-o", "none"], "given"),
        (["-o", "otlp", "-o", "none"], "variable"),
    ],
)
def test_each_place_gets_the_spans_once(here, monkeypatch, capsys, words, place):
    """A receiver that is named twice, or by an option and by a variable, gets each span once; another one, and its line, none."""
    receivers = {name: GrpcReceiver() for name in ("given", "variable")}
    with receivers["given"], receivers["variable"]:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:9")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receivers["variable"].url)
        assert cli.main(["run", *(word.format(given=receivers["given"].url) for word in words), "train.py"]) == 0
    assert {name: receiver.names for name, receiver in receivers.items() if receiver.names} == {place: ["work"]}
    said = capsys.readouterr().err
    assert "not delivered" not in said
    assert [line.split(" to ")[0] for line in said.splitlines() if "sent " in line] == ["otel-torchprof: sent 1 spans"]
    files = [path for path in here.iterdir() if path.suffix == ".json"]
    assert [[event["name"] for event in slices(events_in(path))] for path in files] == [["work"]] * ("t.json" in words)


def test_a_file_that_two_names_lead_to_has_the_spans_once(here, capsys):
    """A link to its folder is no second file; it is named once at the end."""
    (here / "link").symlink_to(here)
    assert cli.main(["run", "-o", "t.json", "-o", "link/t.json", "train.py"]) == 0
    assert [event["name"] for event in slices(events_in(here / "t.json"))] == ["work"]
    assert capsys.readouterr().err.count("wrote ") == 1


def test_what_was_not_delivered_is_said_by_place(here, capsys):
    """Beside a file that was written, a receiver that refuses is named with the spans that it did not get."""
    with GrpcReceiver(turns=[Abort(grpc.StatusCode.INVALID_ARGUMENT, "no")]) as receiver:
        assert cli.main(["run", "--endpoint", receiver.url, "-o", "t.json", "train.py"]) == 0
    target = receiver.url.removeprefix("http://")
    said = capsys.readouterr().err
    assert f"0 dropped, 1 spans not delivered to {target}, " in said
    assert f"sent 0 spans to {target}\n" in said
    assert f"wrote {here / 't.json'}\n" in said


def test_names_of_one_receiver_in_the_variable(monkeypatch):
    """Two names in ``OTEL_TRACES_EXPORTER`` that lead to the same receiver make one exporter."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp,otlp_proto_grpc,otlp_proto_http,none")
    exporters = exporters_from_environment()
    assert [each.displayed_endpoint for each in exporters] == ["localhost:4317", "http://localhost:4318/v1/traces"]
    for each in exporters:
        each.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_speaks(here, monkeypatch, capsys, rank):
    """Both write a file of their own; rank 0 says so and prints the table, rank 1 says nothing, as long as nothing is wrong."""
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--table", "train.py"]) == 0
    path = here / f"train.rank{rank}.trace.json.gz"
    assert [event["name"] for event in slices(events_in(path))] == ["work"]
    said = capsys.readouterr().err
    if rank:
        assert said == ""
    else:
        assert f"wrote {path}; this is rank 0 of 2, and each writes its own\n" in said
        assert "Self CPU time total" in said
