"""``otel-torchprof run``: the script runs as if Python had started it, and what it did is in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chrome_files import events_in, slices

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.run_outputs import exporters_of, policy_of

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def child(*command: str, cwd: Path) -> tuple[int, str, str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *command], text=True, cwd=cwd, env=ENVIRONMENT, **pipes) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def label_names(path: Path) -> list[str]:
    return [event["name"] for event in slices(events_in(path))]


def test_a_module_with_processes_and_threads(tmp_path):
    """``-m`` runs a package with its relative imports, its processes of every kind find it, and a pool that works on is waited for."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text(
        "import multiprocessing, sys, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import otel_torchprof as otp\n"
        "from . import __name__ as package\n"
        "def work(x):\n"
        "    with otp.record_function('in a child'):\n"
        "        return x * len(package)\n"
        "def late(go):\n"
        "    go.wait(60)\n"
        "    with otp.record_function('late'):\n"
        "        print('late')\n"
        "if __name__ == '__main__':\n"
        "    print(__spec__.name, __package__, sys.argv, sys.path[0])\n"
        "    for kind in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(kind).Pool(1) as pool:\n"
        "            print(pool.map(work, [1, 2]))\n"
        "    go = threading.Event()\n"
        "    ThreadPoolExecutor(1).submit(late, go)\n"
        "    threading.Timer(0.05, go.set).start()\n"
    )
    expected = child("-W", "ignore", "-m", "package.run", "--x", cwd=tmp_path)
    command = ("-W", "ignore", "-m", "otel_torchprof", "run", "-qo", "t.json.gz", "-m", "package.run", "--x")
    assert child(*command, cwd=tmp_path) == expected
    assert expected[0] == 0
    assert label_names(tmp_path / "t.json.gz") == ["late"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "t.json.gz"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A folder to run scripts in, within this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["otel-torchprof"])
    monkeypatch.setattr(sys, "path", ["bin", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return tmp_path


LABELS = "import otel_torchprof as otp\nfor _ in range(3):\n    with otp.record_function('work'): pass\n"


def test_where_there_is_nothing_else_to_say(here, capsys):
    """By default there is a file named after the script, and at the end it is said what was recorded and where it is."""
    (here / "train.py").write_text(LABELS)
    assert cli.main(["run", "train.py"]) == 0
    found = capsys.readouterr()
    assert label_names(here / "train.trace.json.gz") == ["work"] * 3
    assert found.out == ""
    assert "0 steps, 3 events, 0 dropped, " in found.err
    assert f"wrote {here / 'train.trace.json.gz'}\n" in found.err


def test_table_and_files(here, capsys):
    """Averages are printed to stderr, sorted as asked; several outputs are written, one of them in parts."""
    (here / "train.py").write_text(LABELS + "print('hello')\n")
    options = ["-o", "a.json", "-o", "b.json.gz", "--max-bytes", "1", "--max-files", "2", "--table", "--sort", "count"]
    assert cli.main(["run", *options, "--", "train.py", "-o"]) == 0
    found = capsys.readouterr()
    assert found.out == "hello\n"
    row = next(line for line in found.err.splitlines() if line.strip().startswith("work"))
    assert row.split()[-1] == "3"
    assert "Node ID" not in found.err
    names = sorted(path.name for path in here.iterdir())
    assert names == ["a.000001.json", "a.000002.json", "b.000001.json.gz", "b.000002.json.gz", "train.py"]
    assert "(2 files)" in found.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train.py", "--epochs", "3"], "run train.py --epochs 3"),
        (["-m", "package"], "run -m package"),
        (["trace.json"], "show trace.json"),
        (["shwo", "trace.json"], "show trace.json"),
    ],
)
def test_a_forgotten_command_is_suggested(here, capsys, words, meant):
    """A command line that begins with a script, a file or a misspelt command is answered with the one that was meant."""
    (here / "trace.json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert f"{words[0]!r} is no command; did you mean otel-torchprof {meant}?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run"], 1, "there is no script to run"),
        (["run", "nowhere.py"], 2, "can't open file '{here}/nowhere.py': [Errno 2] No such file or directory"),
        (["run", "-m", "no_such_package"], 1, "No module named no_such_package"),
        (
            ["run", "-m", "email"],
            1,
            "No module named email.__main__; 'email' is a package and cannot be directly executed",
        ),
        (["run", "."], 1, "can't find '__main__' module in '{here}/.'"),
        (["run", "--nproc", "2", "-c", "1"], 1, "name its file, or a module with -m"),
        (["run", "--nproc", "2", "-"], 1, "name its file, or a module with -m"),
        (["run", "-o", "trace.txt", "x.py"], 1, "--output is 'trace.txt'; its name must end in .json"),
        (["run", "-o", "no/t.json", "x.py"], 1, "create the folder first"),
        (["run", "--max-bytes", "many", "x.py"], 1, "max_bytes is 'many'; allowed is a whole number"),
        (["run", "--every", "other", "x.py"], 1, "every is 'other'; it must be a whole number above 0"),
        (["run", "--schedule", "wait=5", "x.py"], 1, "schedule is 'wait=5'; it must say how many steps are active"),
        (["run", "--keep", "slow", "x.py"], 1, ".json.gz gets every step; add -o FILE.otlp or --endpoint URL"),
    ],
)
def test_what_cannot_be_run(here, capsys, words, status, said):
    """The message says what is wrong, the status is Python's own for it, and no file is left."""
    assert cli.main(words) == status
    assert said.format(here=here) in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "variable", "keep"),
    [
        (["--endpoint", "http://localhost:9"], "", "slow"),
        (["-o", "otlp"], "", "slow"),
        (["-o", "t.otlp"], "", "all"),
        (["--endpoint", "http://localhost:9", "--keep", "all"], "", "all"),
        (["--endpoint", "http://localhost:9", "--every", "2"], "", "all"),
        (["--endpoint", "http://localhost:9"], "max_spans=100", "all"),
    ],
)
def test_what_is_sent_to_a_receiver_by_default(here, monkeypatch, words, variable, keep):
    """A receiver gets the detail of slow steps only, a file that of all, as long as neither an option nor a policy says which."""
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", variable)
    options = cli._parser().parse_args(["run", *words, "x.py"])
    exporters = exporters_of(options, "x")
    try:
        assert policy_of(options, exporters).keep == keep
    finally:
        for exporter in exporters:
            exporter.shutdown()
