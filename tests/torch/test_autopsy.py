"""Jobs over gloo that hang in different ways: ``otel-torchprof autopsy`` names the ranks and the place, while they run and after it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from checked_json import checked

from otel_torchprof._cli import main as cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("autopsy_program.py")
LONG = 60
AT = r"\d\d:\d\d:\d\d\.\d"
ALL_REDUCE, OF_PART, BROADCAST = (
    re.escape(f"{call}")
    for call in (
        "all_reduce(sum, float, 4,000 bytes)",
        "all_reduce(sum, float, 40 bytes)",
        "broadcast(float, 40 bytes, root 0)",
    )
)
SIXTH = "#6 of the default group"
"""What comes after those that all ranks have made (``BEFORE`` of the program)."""


class Scenario(NamedTuple):
    """A job, and patterns of the headlines."""

    mode: str
    ranks: int
    living: tuple[str, ...]
    """While it runs."""
    dead: tuple[str, ...]
    """Once all ranks have been killed."""
    info: dict[str, object]
    """What the JSON has besides."""


def waiting(ranks: str, call: str, absent: str) -> str:
    return f"{ranks} {call} since {AT}, for rank {absent}"


def different(kind: str, usual: str, other: str) -> str:
    calls = rf"ranks 0, 2 called {usual} of \[\[1000\]\]; rank 1 called {other} of \[\[10\]\]"
    return f"{kind}: collective {SIXTH}: {calls}"


def is_in(place: str) -> str:
    return rf"rank 1 is in {place} for [\d,]+\.\d s; the last to end was \S+"


def was_in(place: str) -> str:
    return rf"rank 1 does not run any more; last seen at {AT} in {place}; the last to end was \S+"


def stuck(mode: str, ranks: int, others: str, call: str, place: str) -> Scenario:
    """A job whose rank 1 does not come to a collective."""
    wait = waiting(f"ranks {others} wait in", call, "1")
    return Scenario(
        mode, ranks, (wait, is_in(place)), (wait, was_in(place)), {"culprits": [1], "cycle": [], "missing": []}
    )


SKIPPED = (different("skipped", ALL_REDUCE, BROADCAST),)
REORDERED = (different("reordered", ALL_REDUCE, BROADCAST),)
MISMATCHED = (different("mismatched", ALL_REDUCE, OF_PART),)
FAILED = (f"{ALL_REDUCE} {SIXTH} failed on ranks 0, 2; rank 1 has not come to it", was_in("save_checkpoint"))
CYCLE = (
    "cycle: rank 0 waits for rank 1, which waits for rank 2, which waits for rank 0",
    *(waiting(f"rank {at} waits in", f"{ALL_REDUCE} #1 of group {at + 1}", str((at + 1) % 3)) for at in range(3)),
)
RECV = (
    "cycle: rank 0 waits for rank 1, which waits for rank 0",
    waiting("ranks 1, 2 wait in", f"{ALL_REDUCE} {SIXTH}", "0"),
    rf"rank 0 waits in recv from rank 1 \(tag 0\) of the default group since {AT}",
)
SCENARIOS = [
    Scenario("skip", 3, SKIPPED, SKIPPED, {"culprits": []}),
    Scenario("reorder", 3, REORDERED, REORDERED, {"culprits": []}),
    # Gloo aborts where more comes than there is room for.
    Scenario("mismatch", 3, (*MISMATCHED, was_in(".+")), MISMATCHED, {"culprits": []}),
    stuck("loader", 3, "0, 2", f"{ALL_REDUCE} {SIXTH}", "load_batch"),
    Scenario("dead", 3, FAILED, FAILED, {"culprits": [1]}),
    stuck("hog", 3, "0, 2", f"{ALL_REDUCE} {SIXTH}", "tokenize"),
    Scenario("cycle", 3, CYCLE, CYCLE, {"cycle": [0, 1, 2], "culprits": []}),
    Scenario("recv", 3, RECV, RECV, {"cycle": [0, 1], "culprits": []}),
    stuck("train", 4, "0, 2, 3", rf"{OF_PART} #\d+ of the default group", r"torch\.phase\.data"),
    stuck("loader", 5, "0, 2-4", f"{ALL_REDUCE} {SIXTH}", "load_batch"),
]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Callable[[str], str]]:
    """Gives a line to the process that starts the jobs, and returns its answer. What it has started ends with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:

        def ask(line: str) -> str:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield ask
        process.stdin.close()
        assert process.wait(LONG) == 0


@contextlib.contextmanager
def running(launcher: Callable[[str], str], scenario: Scenario, folder: Path, more: str = "") -> Iterator[None]:
    """Starts the job, and in the end kills its ranks."""
    job = {"mode": scenario.mode, "ranks": scenario.ranks, "folder": str(folder), "more": more}
    assert launcher(json.dumps(job)) == "started"
    try:
        yield
    finally:
        assert launcher("") == "ended"


def headlines(text: str) -> list[str]:
    return text.partition("\n\n")[0].splitlines()


def agree(lines: list[str], patterns: tuple[str, ...]) -> bool:
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


def logs(folder: Path) -> str:
    return "".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("*.log")))


def wait_until_it_hangs(folder: Path, scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> str:
    """Reads the boxes again and again until they show what is expected of them; what the command then says on stdout."""
    deadline, again = time.monotonic() + LONG, threading.Event()
    said = ""
    while not agree(headlines(said), scenario.living):
        assert time.monotonic() < deadline, f"{said}\n{logs(folder)}"
        again.wait(0.05)
        cli.main(["autopsy", str(folder)])  # in this process; it may find no box yet, or half of one
        said = capsys.readouterr().out
    assert cli.main(["autopsy", str(folder)]) == 0
    said, errors = capsys.readouterr()
    assert errors == ""
    assert agree(headlines(said), scenario.living), said
    return said


def json_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    assert cli.main(["autopsy", "--json", str(folder)]) == 0
    return checked("autopsy", capsys.readouterr().out)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: f"{each.mode}-{each.ranks}")
def test_what_is_said_of_a_job_that_hangs(launcher, tmp_path, capsys, scenario):
    """The headlines name ranks, collective and place while the job hangs, as text and as JSON, and its boxes say it still once all are killed."""
    with running(launcher, scenario, tmp_path):
        wait_until_it_hangs(tmp_path, scenario, capsys)
        found = json_of(tmp_path, capsys)
    assert {name: found[name] for name in scenario.info} == scenario.info
    assert [each["rank"] for each in found["ranks"]] == list(range(scenario.ranks))
    assert cli.main(["autopsy", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert agree(headlines(said), scenario.dead), said
    assert not any(each["alive"] for each in json_of(tmp_path, capsys)["ranks"])


def reported(folder: Path, pattern: str) -> tuple[Path, str]:
    """The file of the report, once its first line is of this form, and the line."""
    deadline, again = time.monotonic() + LONG, threading.Event()
    while True:
        for path in folder.glob("otel-torchprof-hang.*.txt"):
            line = path.read_text().partition("\n")[0]
            if re.fullmatch(pattern, line):
                return path, line
        assert time.monotonic() < deadline, (
            f"{[path.read_text() for path in folder.glob('otel-torchprof-hang.*.txt')]}\n{logs(folder)}"
        )
        again.wait(0.05)


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("loader", r"autopsy_program\.py:\d+ batches, in load_batch"),
        ("hog", r"autopsy_program\.py:\d+ hog, in tokenize"),
        ("spin", r"autopsy_program\.py:\d+ spin"),
    ],
)
def test_a_hang_names_its_culprit_by_itself(launcher, tmp_path, mode, place):
    """All ranks that wait write the same line to stderr, which is the first of the one report: the rank that does not come, and its line."""
    scenario = stuck(mode, 4, "0, 2, 3", f"{ALL_REDUCE} {SIXTH}", place)
    wait = waiting("ranks 0, 2, 3 wait in", f"{ALL_REDUCE} {SIXTH}", "1")
    with running(launcher, scenario, tmp_path, ",hang=1"):
        path, line = reported(tmp_path, rf"hang: rank 1 is in {place} for [\d,]+\.\d s; {wait}; see .*")
        deadline, again = time.monotonic() + LONG, threading.Event()
        while not all(f"otel-torchprof: {line}\n" in (tmp_path / f"rank{rank}.log").read_text() for rank in (0, 2, 3)):
            assert time.monotonic() < deadline, logs(tmp_path)
            again.wait(0.05)
    assert line.endswith(f"; see {path}")
    assert agree(headlines(path.read_text().partition("\n\n")[2]), scenario.living)


def test_it_is_no_hang_while_the_rank_moves_that_others_wait_for(launcher, tmp_path):
    """Of ranks that wait for one that does something else, the report says that it may still run, and stderr nothing."""
    with running(launcher, Scenario("evaluate", 3, (), (), {}), tmp_path, ",hang=1,exit"):
        reported(tmp_path, "no hang: rank 1 may still run")
        assert "hang:" not in logs(tmp_path)


def test_a_rank_that_hangs_ends_if_it_is_to(launcher, tmp_path):
    """With exit, the rank that said the line ends with the documented status, and leaves its box."""
    with running(launcher, Scenario("loader", 3, (), (), {}), tmp_path, ",hang=1,exit"):
        assert launcher("wait") == "75"
    assert re.search(r"hang: rank 1 is in .*; this process ends with status 75\n", logs(tmp_path))
    assert len(list(tmp_path.glob("*.otpbox"))) == 3


def test_the_command_says_it_from_anywhere(launcher, tmp_path, capsys):
    """As a program of its own ``autopsy`` writes what it does in this process, and nothing to stderr."""
    scenario = SCENARIOS[0]
    with running(launcher, scenario, tmp_path):
        wait_until_it_hangs(tmp_path, scenario, capsys)
        command = [sys.executable, "-m", "otel_torchprof", "autopsy", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert agree(headlines(done.stdout), scenario.living), done.stdout
