"""What a program sees of this package: what ``docs/how-it-works.md`` says in a table, and nothing else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import preloaded
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

ROOT = Path(__file__).resolve().parents[2]
DETAILS = ("off", "metrics", "steps", "modules", "ops", "frames")


def stated() -> set[tuple[str, str]]:
    """The rows of the table: what is seen, at which details."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    part = page[page.index("## What a program sees of it") :]
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \|$", part, re.MULTILINE)[1:]
    found = set()
    for seen, where in rows:
        details = DETAILS if where == "all" else re.findall(r"`(\w+)`", where)
        if where.endswith("and above"):
            details = DETAILS[DETAILS.index(details[0]) :]
        found |= {(name.replace("`", ""), detail) for name in seen.split("; ") for detail in details}
    return found


@pytest.fixture(scope="module")
def observations(tmp_path_factory):
    """What each program sees, twice without us and at each detail."""
    folder, out = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("seen")
    names = ["without-1", "without-2", *DETAILS]
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", str(ROOT))))
    done = preloaded.run(
        "import sys, seen_runs; seen_runs.main(sys.argv[1], sys.argv[2:])",
        *(str(out), *names),
        environment={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        folder=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


def differences(observations):
    """Names of what differs, each with its detail and what was there without us and with us."""
    first = observations["without-1"]
    second = first | observations["without-2"]
    found = {}
    for detail in DETAILS:
        for program, seen in observations[detail].items():
            for name in seen.keys() | first[program].keys():
                without = first[program].get(name)
                if without == second[program].get(name) and without != seen.get(name):
                    found[name, detail] = (program, without, seen.get(name))
    return found


def test_programs_run(observations):
    """Each program runs to its end, and two runs without us have nearly all in common."""
    first = observations["without-1"]
    second = first | observations["without-2"]
    assert len(first) - len(observations["without-2"]) == 1  # loaded_elsewhere
    assert not {program: seen["failed"] for program, seen in first.items() if "failed" in seen}
    seen = [(program, name) for program, names in first.items() for name in names]
    assert len(first) > 20
    # One of some hundred observations may differ by chance, once in some twenty runs; it is then no difference that we could make.
    unstable = [each for each in seen if first[each[0]][each[1]] != second[each[0]].get(each[1])]
    assert len(unstable) <= 1, unstable


def test_a_program_sees_what_the_page_says(observations):
    """Outputs, gradients, random numbers, bytes, attributes, graphs, warnings, tracebacks, handlers: the rest is as without us."""
    found = differences(observations)
    assert {each: found[each] for each in found.keys() - stated()} == {}
    assert stated() - found.keys() == set()
