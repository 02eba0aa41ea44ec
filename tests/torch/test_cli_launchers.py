"""Ranks under ``otel-torchprof run``: each is recorded, whichever way they are started."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import preloaded
import pytest

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.run import TORCHRUN, launched

if TYPE_CHECKING:
    import subprocess

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(30):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"rank {dist.get_rank()} {sys.argv[1]} {__name__}\\n")  # at once, beside the other rank
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


def arguments_of(*words: str) -> list[str]:
    """What the launcher is given."""
    options = cli._parser().parse_args(["run", *words])
    found = launched(options, options.program)
    assert found is not None
    return found.arguments


OURS = ["otel_torchprof", "run", "--sort=self_cpu_time_total", "--rows=20"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--nproc", "2", "a.py", "-x"],
            ["--standalone", "--nproc-per-node=2", "-m", *OURS, "a.py", "-x"],
        ),
        (["--nproc", "auto", "-m", "a.b"], ["--standalone", "--nproc-per-node=auto", "-m", *OURS, "-m", "a.b"]),
        (
            ["-m", TORCHRUN, "--nproc-per-node", "2", "--", "a.py", "-m"],
            ["--nproc-per-node", "2", "-m", *OURS, "a.py", "-m"],
        ),
        (["-m", TORCHRUN, "-m", "a.b", "--", "c"], ["-m", *OURS, "-m", "a.b", "--", "c"]),
        (["torchrun", "--nproc-per-node", "2", "a.py"], ["--nproc-per-node", "2", "-m", *OURS, "a.py"]),
        (["accelerate", "launch", "--cpu", "a.py"], ["--cpu", "-m", *OURS, "a.py"]),
        (
            ["-m", "accelerate.commands.launch", "--num_processes", "1", "a.py"],
            ["--num_processes", "1", "-m", *OURS, "a.py"],
        ),
    ],
)
def test_the_command_stands_before_the_program(words, expected):
    """The launcher's own words stay, and what it starts in each rank is this command with the program as it was given."""
    assert arguments_of(*words) == expected


def test_ranks_get_the_options(tmp_path):
    """Every option but those of the launching itself, with its value, however often it was given."""
    outputs = [f"--output={tmp_path}/{name}" for name in ("a.json", "b.otlp")]
    words = [*outputs, "--stacks", "--every=2", "--quiet", "--max-files=3"]
    found = arguments_of("--nproc", "2", "--explain", "--report", f"{tmp_path}/r.html", *words, "a.py")
    assert sorted(found[found.index("run") + 1 : -1]) == sorted([*words, "--sort=self_cpu_time_total", "--rows=20"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--nproc", "2", "-m", TORCHRUN, "a.py"],
            f"--nproc starts the ranks by itself: leave it out, or {TORCHRUN}",
        ),
        (["-m", TORCHRUN, "--no-python", "a.sh"], "starts with --no-python cannot be recorded"),
        (["-m", TORCHRUN, "--run-path", "a.py"], "starts with --run-path cannot be recorded"),
        (["--nproc", "2", "-o", "none", "--explain", "a.py"], "there is none: add -o FILE"),
        (["--nproc", "2", "-o", "no/t.json", "a.py"], "create the folder first"),
    ],
)
def test_ranks_that_cannot_be_recorded(capsys, words, said):
    """It is said before any rank is started, once."""
    assert cli.main(["run", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_number_of_processes(capsys):
    """Anything else is refused as a usage error."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--nproc", "0", "a.py"])
    assert caught.value.code == 2
    assert "'0' is no number of processes" in capsys.readouterr().err


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A module as a command, in a folder with the program, by a fork of a process with both; the ranks' interpreters are their own."""
    (folder / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"environment": environment, "folder": folder, "timeout": 240, "has_package": True}
    return preloaded.run(("-m", words[0]), *words[1:], **options)


def written_in(folder: Path) -> list[str]:
    """Names of the files of ranks, each of which has the operators of its rank."""
    paths = sorted(folder.glob("train.rank*"))
    for path in paths:
        document = json.loads(gzip.decompress(path.read_bytes()))
        assert "aten::linear" in {event["name"] for event in document["traceEvents"]}
    return [path.name for path in paths]


def test_two_ranks_and_what_explains_them(tmp_path):
    """``--nproc 2 --explain --report``: a file of each rank, all read once for each, also where an older run left one of a third; nothing warns."""
    (tmp_path / "train.rank2.trace.json.gz").write_text("of an older run")
    done = run(tmp_path, "otel_torchprof", "run", "--nproc", "2", "--explain", "--report", "r.html", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 0 __main__", "rank 1 0 __main__"]
    (tmp_path / "train.rank2.trace.json.gz").unlink()
    assert written_in(tmp_path) == ["train.rank0.trace.json.gz", "train.rank1.trace.json.gz"]
    assert done.stderr.count("2 ranks, 60 steps") == 1
    assert done.stderr.count("otel-torchprof: wrote ") == 2
    assert all(f'"name":"rank {rank}"' in (tmp_path / "r.html").read_text() for rank in (0, 1))
    assert "otel-torchprof: rank 1: " not in done.stderr
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.exhaustive
def test_under_torchrun_with_a_role(tmp_path):
    """``torchrun -m otel_torchprof run``: names with the role, and rank 0 says how to have all ranks explained."""
    torchrun = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--role", "actor"]
    done = run(tmp_path, *torchrun, "-m", "otel_torchprof", "run", "--explain", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert written_in(tmp_path) == ["train.rank0.actor.trace.json.gz", "train.rank1.actor.trace.json.gz"]
    assert done.stderr.count("this is of rank 0; when all have ended: otel-torchprof explain train.rank*.json.gz") == 1


@pytest.mark.exhaustive
def test_a_rank_that_fails(tmp_path):
    """The exit status and the report of the failure are those of the launcher."""
    (tmp_path / "fails.py").write_text("import sys; sys.exit(3)")
    done = run(tmp_path, "otel_torchprof", "run", "--nproc", "2", "-o", "none", "fails.py")
    assert done.returncode == 1
    assert "ChildFailedError" in done.stderr
    assert "exitcode  : 3" in done.stderr
