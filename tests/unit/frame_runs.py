"""Programs in an interpreter of their own: what they do there could take the tests with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HELPERS = ROOT / "tests" / "helpers"


def run(program: str, *, options: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds this checkout and the tests' helpers; ends it after two minutes."""
    path = os.pathsep.join([str(ROOT), str(HELPERS)])
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, **variables},
        check=False,
    )


def printed(program: str, *, status: int = 0, errors: str = "") -> list[str]:
    """The words that a program printed, which ends as it should and with nothing else on its standard error."""
    done = run(program)
    assert (done.returncode, done.stderr) == (status, errors), done.stdout
    return done.stdout.split()
