"""``diff --interleave``: two commands run by turns, and nothing of them is left; with programs that write made-up traces."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from checked_json import checked

from otel_torchprof._answers.difference import ComparedRecording
from otel_torchprof._answers.pairs import NameTimes, RunTimes, judged_pairs
from otel_torchprof._cli import interleaved
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.diff_command import with_commands
from otel_torchprof.errors import TorchProfError

PROGRAM = """
import json, os, random, signal, sys
output, name, factor, *how = sys.argv[1:]
place = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(place, "order"), "a") as order:
    order.write(name)
with open(os.path.join(place, "order")) as order:
    number = len(order.read())
if how and number > int(how[1]):
    print("\\n".join(f"line {n}" for n in range(50)), flush=True)
    if how[0] == "fail":
        sys.exit(7)
    if how[0] == "orphan":
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with open(os.path.join(place, "orphan"), "w") as file:
                file.write(str(os.getpid()))
            signal.pause()
        while not os.path.exists(os.path.join(place, "orphan")):
            pass
    os.kill(os.getppid(), signal.SIGTERM if how[0] == "terminate" else signal.SIGINT)
    signal.pause()
now, events = 0.0, []
for step in range(40):
    begin = now
    for op in range(8):
        ms = (1 + op / 10) * (float(factor) if op == 2 else 1) * random.uniform(0.99, 1.01)
        events.append({"ph": "X", "cat": "cpu_op", "name": f"op{op}", "pid": 1, "tid": 1, "ts": now * 1e3, "dur": ms * 1e3})
        now += ms
    mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
    events.append({**mark, "ts": begin * 1e3, "dur": (now - begin) * 1e3})
if name != "N":
    import gzip
    (gzip.open if output.endswith(".gz") else open)(output, "wt").write(json.dumps({"traceEvents": events}))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program that appends its first argument to the file ``order``, and takes its second times as long in ``op2``."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    start = [sys.executable, "-S", str(path)]
    monkeypatch.setattr(interleaved, "_REPETITIONS", 1)
    monkeypatch.setattr(interleaved, "recorded", lambda command, output, _: [*start, output, *shlex.split(command)])
    return path


def diff(*words, rounds=6):
    return cli.main(["diff", "-q", "--interleave", str(rounds), *words])


def left(program):
    return list((program.parent / "temporary").iterdir())


def test_two_programs(program, capsys):
    """InterleavedRuns alternate their order, the operator that became slower is named with its pairs, and no file remains."""
    assert diff("--json", "--", "A", "1", "--", "B", "1.3") == 1
    found = checked("diff", capsys.readouterr().out)
    assert (program.parent / "order").read_text() == "ABBA" * 3
    assert [change["name"] for change in found["changes"]] == ["op2"]
    assert found["changes"][0]["share"] == pytest.approx(0.3 * 1.2 / 10.8, rel=0.1)
    assert (found["before"]["path"], found["after"]["path"], found["rounds"]["pairs"]) == ("A 1", "B 1.3", 6)
    assert left(program) == []


def test_a_folder_keeps_the_traces(program, tmp_path, capsys):
    """The traces and the output of each run are in the folder that is named, and one program is no different from itself."""
    assert diff("-o", str(tmp_path / "kept"), "--", "A", "1", "--", "B", "1") == 0
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert len(names) == 25
    assert names[:2] == ["a-001.json.gz", "a-001.log"]
    assert "no difference" in capsys.readouterr().out


def test_a_folder_of_an_earlier_comparison(program, tmp_path, capsys):
    """Traces of another comparison would be taken for those of this one: they are named, and nothing runs."""
    (tmp_path / "a-001.log").touch()
    (tmp_path / "b-001.rank1.json.gz").touch()
    assert diff("-o", str(tmp_path), "--", "A", "1", "--", "B", "1") == 3
    assert f"{str(tmp_path / 'b-001.rank1.json.gz')!r} is of an earlier comparison" in capsys.readouterr().err
    assert not (tmp_path / "order").exists()
    for record in ("[]", "{", '{"commands": ["A 1", "C 1"], "detail": "ops", "speeds": []}'):
        (tmp_path / "comparison.json").write_text(record)
        assert diff("-o", str(tmp_path), "--", "A", "1", "--", "B", "1") == 3
        assert f"{str(tmp_path / 'comparison.json')!r} is of an earlier comparison" in capsys.readouterr().err
    assert not (tmp_path / "order").exists()


@pytest.mark.parametrize(("how", "status"), [("interrupt", 3), ("terminate", 128 + signal.SIGTERM)])
def test_a_comparison_that_was_cut_off(program, tmp_path, capsys, how, status):
    """The same command with the same folder runs the rounds that are not complete, and none other; an interrupted one anew."""
    order, folder = tmp_path / "order", str(tmp_path / "kept")

    def resumed():
        order.write_text("")
        try:
            return diff("-o", folder, "--", "A", "1", "--", "B", "1.3", how, "5")
        except SystemExit as ended:
            return ended.code

    for complete in (2, 4):
        assert resumed() == status
        assert f"{complete} of 6 rounds are complete in {folder!r}: the same command runs the others" in (
            capsys.readouterr().err
        )
        assert order.read_text() == "ABBAAB"
    assert resumed() == 1
    assert order.read_text() == "ABBA"
    assert "6 pairs of runs" in capsys.readouterr().out
    assert diff("-o", folder, "--", "A", "1", "--", "B", "1.3", how, "6") == 3
    assert "is of an earlier comparison, of other commands" in capsys.readouterr().err


def test_rounds_that_are_added(program, tmp_path, capsys):
    """More rounds than a named folder has are added to it; as many are read, and none runs."""
    words = ("--json", "-o", str(tmp_path / "kept"), "--", "A", "1", "--", "B", "1.3")
    assert diff(*words) == 1
    first = json.loads(capsys.readouterr().out)
    assert diff(*words) == 1
    again = json.loads(capsys.readouterr().out)
    assert (tmp_path / "order").read_text() == "ABBA" * 3
    assert again == first
    assert diff(*words, rounds=8) == 1
    assert json.loads(capsys.readouterr().out)["rounds"]["pairs"] == 8
    assert (tmp_path / "order").read_text() == "ABBA" * 4
    (tmp_path / "kept" / "b-002.json.gz").unlink()
    assert diff(*words, rounds=8) == 3
    assert "has no trace 'b-002' of its complete rounds" in capsys.readouterr().err


def test_a_command_of_another_user(monkeypatch):
    """A command that became another user's cannot be ended: the error says how; one that has ended by itself is none."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    def started(text):
        return subprocess.Popen([sys.executable, "-S", "-c", text], start_new_session=True)

    with started("import signal; signal.pause()") as waiting, started("") as ended:
        ended.wait()
        with monkeypatch.context() as patch:
            patch.setattr(interleaved.os, "killpg", refuse)
            interleaved._end(ended, "A")
            with pytest.raises(TorchProfError, match=rf"of 'A' cannot be ended.* `sudo kill -9 -- -{waiting.pid}`"):
                interleaved._end(waiting, "A")
        interleaved._end(waiting, "A")
    assert waiting.returncode not in (None, 0)


def test_a_command_that_fails(program, capsys):
    """Its status is that of ``diff``, and its last lines are displayed; a command that cannot be started has the status of a shell."""
    assert diff("--", "A", "1", "--", "B", "1", "fail", "5") == 7
    said = capsys.readouterr().err
    assert "'B 1 fail 5' ended with status 7; its last lines:" in said
    assert ("line 49" in said, "line 30\n" in said, "line 29" in said) == (True, True, False)
    assert left(program) == []
    assert diff("--", "N", "1", "--", "B", "1") == 3
    assert "'N 1' wrote no trace" in capsys.readouterr().err


def test_a_command_that_cannot_be_started(tmp_path, capsys):
    """The program that is missing is named, and the status is that of a shell."""
    python = str(tmp_path / "python3")
    assert diff("--", python, "x.py", "--", "x.py") == 127
    assert f"cannot start {python!r}" in capsys.readouterr().err


@pytest.mark.parametrize(("after", "status"), [(13, 1), (5, 3)])
def test_an_interrupt(program, capsys, after, status):
    """Ctrl-C ends the running command; complete rounds are compared if they are enough, and else counted."""
    assert diff("--", "A", "1", "--", "B", "1.3", "interrupt", str(after), rounds=20) == status
    said = capsys.readouterr()
    if status == 1:
        assert "6 pairs of runs" in said.out or "7 pairs of runs" in said.out
    else:
        assert "2 of 20 rounds are complete; 6 are needed" in said.err
    assert left(program) == []


def test_what_a_command_started_ends_too(program, monkeypatch):
    """A process that a command started, and that ignores Ctrl-C, is killed before ``diff`` ends."""
    monkeypatch.setattr(interleaved, "_GRACE", 0.2)
    assert diff("--", "A", "1", "--", "B", "1", "orphan", "3") == 3
    orphan = int((program.parent / "orphan").read_text())
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(orphan)], [], [], 60)[0]


def test_a_terminated_diff(program):
    """SIGTERM ends the running command and deletes the files, and the former handler is back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        diff("--", "A", "1", "--", "B", "1", "terminate", "3")
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert left(program) == []


@pytest.mark.parametrize("waiting", [1, 3])
def test_runs_without_a_processor(waiting):
    """A pair with a run whose steps have no time of their own is left out, which is said; too few others are an error."""
    names = {"aten::mm": NameTimes(0.004, 1.0, ("aten::mm",))}
    run = RunTimes(ComparedRecording("a", 100, 0.01, 0.0), 0.01, names)
    pairs = [(run, run._replace(step=0.0))] * waiting + [(run, run)] * (8 - waiting)
    if waiting == 1:
        found = judged_pairs(pairs, np.zeros(8))
        assert (found.rounds.pairs, found.ratio) == (7, 1.0)
        assert found.caveats[0].startswith("pairs left out: 1, as")
    else:
        with pytest.raises(TorchProfError, match=r"^3 of 8 pairs have a run whose loop waited .*, and 6 others"):
            judged_pairs(pairs, np.zeros(8))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 3", [sys.executable, "RUN", "train.py", "--lr", "3"]),
        ("-m package.train", [sys.executable, "RUN", "-m", "package.train"]),
        ("python train.py", ["python", "RUN", "train.py"]),
        ("/v/bin/python3.13t -X dev -u -m train", ["/v/bin/python3.13t", "-X", "dev", "-u", "RUN", "-m", "train"]),
        ("env A=1 python -c pass", ["env", "A=1", "python", "RUN", "-c", "pass"]),
        ("train.py --language python x", [sys.executable, "RUN", "train.py", "--language", "python", "x"]),
    ],
)
def test_what_is_run(command, expected):
    """``otel-torchprof run`` comes before the script, in the interpreter that the command names."""
    run = ["-m", "otel_torchprof", "run", "--quiet", "--output=x.json", "--detail=ops"]
    place = expected.index("RUN")
    assert interleaved.recorded(command, "x.json", "ops") == [*expected[:place], *run, *expected[place + 1 :]]


@pytest.mark.parametrize("command", ["", "otel-torchprof run train.py"])
def test_what_cannot_be_run(command):
    """A command that is empty, or that records by itself, is refused with the way out."""
    with pytest.raises(TorchProfError, match="name a script, -m MODULE or python SCRIPT"):
        interleaved.recorded(command, "x.json", "ops")


def test_wrong_arguments(capsys):
    """Too few rounds, and one command or three, are errors of usage; arguments of commands stay as they are."""
    words = ["diff", "--interleave", "8", "--", "a", "--json", "b c", "--", "d"]
    assert with_commands(words) == ["diff", "--interleave", "8", "--", "a --json 'b c'", "d"]
    assert with_commands(["diff", "--", "-a", "-b"]) == ["diff", "--", "-a", "-b"]
    for wrong in (["--interleave", "5", "--", "a", "--", "b"], ["--interleave", "6", "--", "a"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["diff", *wrong])
        assert ended.value.code == 2
    with pytest.raises(SystemExit):
        diff("--", "a", "--", "b", "--", "c")
    assert "'5' is no number of rounds: a whole number from 6" in capsys.readouterr().err


def test_the_progress(monkeypatch):
    """The line has the round, the command, and how long it may take yet, from the runs so far."""
    now = 100.0
    monkeypatch.setattr(interleaved.time, "monotonic", lambda: now)
    options = cli._parser().parse_args(["diff", "--interleave", "10", "a", "b"])
    rounds = interleaved.InterleavedRuns(("a", "b"), options)
    assert rounds._line().startswith("otel-torchprof: measuring the machine")
    rounds._place, rounds._done, rounds._begin_of_run = "round 3 of 10, A", 4, 120.0
    now = 122.0
    assert rounds._line() == (
        "otel-torchprof: round 3 of 10, A: 2.0 s, about 0:01:18 left (Ctrl-C compares what is complete, from 6 rounds on)"
    )
