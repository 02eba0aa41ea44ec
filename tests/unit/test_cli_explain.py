"""``otel-torchprof explain``: what it prints, and files that are not to be trusted."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import forked_programs
import numpy as np
import pytest
from checked_json import checked
from explained_files import STEP_MS, Trace, kineto, piece
from hypothesis import given
from hypothesis import strategies as st
from malformed_files import malformed

import otel_torchprof as otp
from otel_torchprof._answers import details
from otel_torchprof._answers.details import PairSums
from otel_torchprof._cli import main as cli
from otel_torchprof._cli import terminal

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 160 << 20
"""A hundred more than what a program has that has read nothing."""
MOST_FOR_NAMES_IN_STEPS = 120 << 20
"""What 630 bytes for each event would exceed: the file has 100,000."""


@pytest.fixture
def waiting(tmp_path):
    """A recording that waits for data."""
    return Trace().steps(60, data=0.5).chrome(tmp_path / "t.json")


def test_what_it_prints(waiting, capsys):
    """The verdict first, then evidence, next action and check, and the phases with bars as long as their shares."""
    assert cli.main(["explain", str(waiting)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "input-bound: 50% of step time waits for data  [severity high, firm]"
    assert [line.split()[0] for line in lines[1:6]] == ["evidence", "evidence", "at", "next", "check"]
    assert "60 steps, 55 of them steady, median 10.0ms; whether the machine was busy is not in the file" in lines
    [row] = [line for line in lines if line.startswith("data ")]
    assert row.split() == ["data", "5.00ms", "5.00ms", "50%", "█" * 15]


def test_json(waiting, capsys):
    """All that is known, with the rules by which it is said, and the same as the function's."""
    assert cli.main(["explain", "--json", str(waiting)]) == 0
    found = checked("explain", capsys.readouterr().out)
    assert found == json.loads(json.dumps(otp.explain(waiting).as_json()))
    assert found["rules"]["bound_share"] == 0.2


def test_markdown_of_any_names(tmp_path, capsys):
    """Names from the file are text: no Markdown, no HTML, nothing that is not printable."""
    name = "aten::<img src=x>|`*[\x1b[31m\u202e\U0001f600"
    path = kineto(tmp_path / "t.json", 60, lambda begin: [piece(name, begin, STEP_MS)])
    assert cli.main(["explain", "--markdown", str(path)]) == 0
    out = capsys.readouterr().out
    assert "aten::\\<img src=x\\>\\|\\`\\*\\[" in out
    assert not {"\x1b", "\u202e"} & set(out)
    assert cli.main(["explain", str(path)]) == 0
    assert not {"\x1b", "\u202e"} & set(capsys.readouterr().out)


def test_a_terminal_without_unicode(waiting):
    """Bars are of ASCII where the output's encoding has nothing else."""
    words = (sys.executable, "-m", "otel_torchprof", "explain", str(waiting))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert f"50%  {'#' * 15}\n" in done.stdout
    assert done.stderr == ""


def test_progress(waiting):
    """Each file is read once, and the bar says how much of that is done."""
    reading = terminal.ReadingProgress([str(waiting)], 1)
    seen = []

    def watch(path, stream):
        reading.watch(path, stream)
        seen.append(reading.line())

    otp.explain(waiting, watch=watch)
    assert [line.partition("] ")[2].split()[0] for line in seen] == ["100%"]  # the file is one read


def test_several_files(tmp_path, waiting, capsys):
    """Several files are several ranks, by their names where they have no numbers."""
    other = Trace().steps(60).chrome(tmp_path / "other.json")
    assert cli.main(["explain", str(waiting), str(other)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 120 steps" in out
    assert "on t.json]" in out


def test_run_and_explain(tmp_path, capsys, monkeypatch):
    """``run --explain`` and ``--report`` read what it wrote, also if the script changes the folder; without a file it does not begin."""
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(
        "import otel_torchprof as otp\nfor _ in range(9):\n  with otp.record_function('a'): pass\nimport os; os.chdir('/')\n"
    )
    words = [
        sys.executable,
        "-m",
        "otel_torchprof",
        "run",
        "-q",
        "--explain",
        "--report",
        "r.html",
        "-o",
        "t.json",
        "p.py",
    ]
    done = forked_programs.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "")
    assert "events and no step: steps are known of loops with a backward pass" in done.stderr
    assert done.stderr.endswith(f"otel-torchprof: wrote {tmp_path / 'r.html'}, for a browser\n")
    assert '"names":["a"' in Path("r.html").read_text()
    for words, said in (
        (["--explain", "-o", "none"], "there is none: add -o FILE"),
        (["--report", "r.html", "-o", "none"], "--report reads the file that is written, and there is none"),
        (["--report", "none/r.html"], "create the folder first"),
    ):
        assert cli.main(["run", *words, "p.py"]) == 1
        assert said in capsys.readouterr().err


# ---- files that are not to be trusted ----


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "at byte 0: the file is empty"),
        (b"nonsense", "expected a Chrome trace, or OTLP"),
        (b"[]", "is a trace without a span"),
        (b'[{"ph":"X","name":"a","ts":1,"dur":1}]', "has 1 events and no step: steps are known of"),
        (b'[{"ph":"X","name":"ProfilerStep#1","ts":1,"dur":-5}]', "1 steps that do not last are left out"),
        (b'[{"ph":"X","name":"ProfilerStep#x","ts":1,"dur":5}]', "has 1 events and no step"),
        (b'[{"ph":"X","name":"ProfilerStep#1","ts":NaN,"dur":5}]', "ts is nan, expected a number"),
    ],
)
def test_files_without_steps(tmp_path, content, said, capsys):
    """One message that names the file, what is wrong and the way out."""
    (tmp_path / "t").write_bytes(content)
    assert cli.main(["explain", str(tmp_path / "t")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert str(tmp_path / "t") in err


def test_what_is_left_out_is_said(tmp_path, capsys):
    """Steps that do not last, what follows the document, and what is of too many processes: each is counted, and the status is 1."""
    path = kineto(tmp_path / "t.json", 60)
    document = json.loads(path.read_text())
    document["traceEvents"][10]["dur"] = -5.0
    path.write_text(json.dumps(document) + "{}")
    assert cli.main(["explain", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "59 steps, 54 of them steady" in out
    assert "1 steps that do not last are left out" in err
    assert re.search(r"more follows the end of the document, .*that is not counted", err)
    others = [piece("ProfilerStep#1", 0.0, 1.0, pid=number) for number in range(10, 1500)]
    path.write_text(json.dumps(document | {"traceEvents": [*others, *document["traceEvents"]]}))
    assert cli.main(["explain", str(path)]) == 1
    assert "467 events of processes beyond 1,024 are left out" in capsys.readouterr().err


def test_a_file_that_is_given_twice(tmp_path, capsys):
    """It is no second rank."""
    path = kineto(tmp_path / "t.json", 60)
    assert cli.main(["explain", str(path), str(path)]) == 1
    assert "is given twice: give each file once" in capsys.readouterr().err


def test_names_forge_no_lines(tmp_path, capsys):
    """A name with a line feed stays in its line, and is no mention and no link in Markdown."""
    name = "aten::a\n@org/all no fault found https://example.org"
    path = kineto(tmp_path / "t.json", 60, lambda begin: [piece(name, begin, 0.9 * STEP_MS)])
    assert cli.main(["explain", str(path)]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith(("no fault", "@"))]
    assert cli.main(["explain", "--markdown", str(path)]) == 0
    assert "@<!-- -->org/all no fault found https:<!-- -->//example.org" in capsys.readouterr().out


def test_a_file_that_can_be_read_once(tmp_path, capsys):
    """A pipe is read as a file is; for one that is not there, what to do is said."""
    os.mkfifo(tmp_path / "pipe")
    trace = kineto(tmp_path / "t.json", 60)
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(trace.read_bytes()))
    writer.start()
    assert cli.main(["explain", str(tmp_path / "pipe")]) == 0
    writer.join()
    assert "60 steps" in capsys.readouterr().out
    assert cli.main(["explain", str(tmp_path / "none")]) == 1
    assert "check the name" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path)]) == 1
    assert "give the name of a file in it" in capsys.readouterr().err
    with pytest.raises(otp.TorchProfError, match="no file to explain"):
        otp.explain()


def test_a_file_that_is_cut_off(waiting, capsys):
    """What comes before the end is explained; the exit status is 1, and stderr says once where it ends."""
    waiting.write_bytes(waiting.read_bytes()[:-2000])
    assert cli.main(["explain", str(waiting)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("input-bound: 50%")
    assert err.count("the file is cut off") == 1


@pytest.mark.parametrize(
    "attributes",
    [
        {"torch.phase.data.duration": 1e9},
        {"torch.phase.data.duration": -1.0},
        {"torch.phase.data.duration": "NaN"},
        {"torch.step.kind": 7},
        {"torch.step.number": 1 << 62},
        {"torch.step.runnable_duration": "soon"},
        {"torch.dropped_events": 1e300},
        {"torch.collective.name": "all_reduce", "torch.collective.sequence_nr": -1},
        {"thread.id": []},
        {"torch.step.page_faults.major": {}},
    ],
)
def test_values_that_cannot_be(tmp_path, attributes):
    """A step with such a value is not counted, or is counted within what a step can be; those after it are."""
    trace = Trace().steps(60, data=0.5)
    trace.spans[30]["attributes"] |= attributes
    found = otp.explain(trace.chrome(tmp_path / "t.json"))
    assert [each.verdict for each in found.faults] == ["input-bound"]
    assert found.steps in {59, 60}
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("read", [otp.explain, lambda path: otp.diff(path, path)], ids=["explain", "diff"])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_the_file(tmp_path_factory, read, seed):
    """Any fault in any form: an answer, or an error that names the file; and compared with itself no difference."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(malformed(seed).content)
    try:
        found = read(path)
    except otp.TorchProfError as error:
        assert str(path) in str(error)  # noqa: PT017 - most have none, and a few can be explained
    else:
        json.dumps(found.as_json(), allow_nan=False)
        assert getattr(found, "changes", ()) == ()


MEASURED = """
import pathlib, re, sys
from otel_torchprof._cli import main as cli
for name in sys.argv[2:]:
    code = cli.main([sys.argv[1], *[name] * (1 + (sys.argv[1] == "diff"))])
    print(code, re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def _slice(name, start, duration=9, pid=1, tid=1):
    return f'{{"ph":"X","name":"{name}","ts":{start},"dur":{duration},"pid":{pid},"tid":{tid}}}'


def _steps(count, **more):
    return [_slice(f"ProfilerStep#{number}", number * 10, **more) for number in range(count)]


BOMBS = {
    "names in each step": lambda: [
        *_steps(1000),
        *(_slice(f"aten::{n % 9000}", n // 100 * 10 + n % 100 / 12, 0.05) for n in range(100_000)),
    ],
    "steps": lambda: _steps(60_000),
    "processes": lambda: [_slice("ProfilerStep#1", number, pid=number) for number in range(20_000)],
    "names": lambda: [
        *_steps(100),
        *(_slice(f"aten::{n}" + "\\ud83d\\ude00" * 900, n % 1000, 1) for n in range(6_000)),
    ],
    "threads": lambda: [*_steps(50), *(_slice("aten::mm", n % 500, 1, tid=n) for n in range(50_000))],
    "nested": lambda: [*_steps(50, duration=1e6), *(_slice("aten::mm", n / 1e3, 1e6 - n) for n in range(10_000))],
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """A folder with small files that grow when they are read, each made when it is first asked for."""
    folder = tmp_path_factory.mktemp("bombs")

    def paths(*names):
        for name in names:
            if not (folder / name).exists():
                (folder / name).write_bytes(gzip.compress(f"[{','.join(BOMBS[name]())}]".encode(), 1))
        return [str(folder / name) for name in names]

    return paths


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("explain", tuple(BOMBS)),
        ("diff", ("names in each step", "nested")),
        pytest.param("diff", tuple(BOMBS), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} files",
)
def test_memory_is_bounded(bombs, command, names):
    """Small files that grow when they are read stay under 160 MB, one after another; the first, of many names, under 120 MB."""
    words = (sys.executable, "-c", MEASURED, command, *bombs(*names))
    done = forked_programs.run(words, cwd=ROOT)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    ends = [list(map(int, line.split())) for line in done.stderr.splitlines() if re.fullmatch(r"\d+ \d+", line)]
    for name, (code, most) in zip(names, ends, strict=True):
        allowed = MOST_FOR_NAMES_IN_STEPS if name == "names in each step" else MOST_MEMORY
        assert (code in {0, 1, 3}, most << 10 < allowed) == (True, True), name  # 3: too uncertain to be judged


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 9)), max_size=9), max_size=6),
    st.integers(1, 3),
)
def test_the_largest_of_each_group(batches, count):
    """Sums by pair are those of a dictionary, and of each group the largest are kept, the largest first."""
    sums, expected = PairSums(), defaultdict(int)
    for batch in batches:
        columns = [np.array(column, np.int64) for column in zip(*batch, strict=True)] or [np.empty(0, np.int64)] * 3
        sums.add(*columns)
        for group, member, value in batch:
            expected[group, member] += value
    by_group = defaultdict(list)
    for (group, _), value in expected.items():
        by_group[group].append(value)
    groups, members, values = (column.tolist() for column in sums.largest(count))
    assert groups == sorted(groups)
    for group, found in by_group.items():
        kept = [value for each, value in zip(groups, values, strict=True) if each == group]
        assert kept == sorted(found, reverse=True)[:count]
    assert [expected[pair] for pair in zip(groups, members, strict=True)] == values


def test_groups_are_cut_while_they_come(monkeypatch):
    """Beyond so many pairs, the small ones of each group are let go, and the largest stays right."""
    monkeypatch.setattr(details, "_MOST_PAIRS", 100)
    sums = PairSums()
    for _ in range(3):
        for member in range(200):
            one = np.ones(1, np.int64)
            sums.add(one, one * member, one * (1 + 1000 * (member == 7)))
    _, members, values = sums.largest(1)
    assert (members.tolist(), values.tolist()) == ([7], [3003])
