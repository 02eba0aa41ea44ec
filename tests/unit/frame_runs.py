"""Programs in an interpreter of their own: what they do there could take the tests with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import forked_programs

ROOT = Path(__file__).resolve().parent.parent.parent
HELPERS = ROOT / "tests" / "helpers"


def run(
    program: str, *, options: tuple[str, ...] = (), is_new: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds this checkout and the tests' helpers, forked or by a new interpreter; ends it after two minutes."""
    path = os.pathsep.join([str(ROOT), str(HELPERS)])
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    if is_new:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    return forked_programs.run(command, timeout=120, env=environment)


def printed(program: str, *, status: int = 0, errors: str = "", is_new: bool = False) -> list[str]:
    """The words that a program printed, which ends as it should and with nothing else on its standard error."""
    done = run(program, is_new=is_new)
    assert (done.returncode, done.stderr) == (status, errors), done.stdout
    return done.stdout.split()
