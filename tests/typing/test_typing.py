"""The typed program runs, and type-checks."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import otel_torchprof as otp

PROGRAM = Path(__file__).parent / "api.py"


def test_the_typed_program_runs() -> None:
    """What is type-checked also works."""
    assert runpy.run_path(str(PROGRAM))["main"]() == otp.__version__


def test_every_public_name_is_used() -> None:
    """The program leaves out no name of the package."""
    text = PROGRAM.read_text()
    assert [name for name in otp.__all__ if f"otp.{name}" not in text] == []


def test_it_type_checks() -> None:
    """Strict mypy finds nothing in the program."""
    pytest.importorskip("mypy")
    root = PROGRAM.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(PROGRAM)], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = """
import otel_torchprof as otp

otp.profile(enargy=True)
otp.stream(energy="much")
otp.TorchInstrumentor().instrument(detial="ops")
otp.TorchInstrumentor().instrument(detail="operators")
otp.TorchInstrumentor().instrument(ranks="alone", steps="atuo", device_events="op")
otp.TorchInstrumentor().uninstrument(detail="ops")
otp.profile().events()[0].cpu_parant
"""


def test_mistakes_do_not_type_check(tmp_path: Path) -> None:
    """Misspelt arguments, words that are none of those allowed, and attributes that events do not have are errors for mypy already."""
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(wrong)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROGRAM.parent.parent.parent,
    )
    errors = [line.split(": ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [place.rpartition(":")[2] for place, *_ in errors] == [*map(str, (4, 5, 6, 7, 8, 8, 8, 9, 10))], done.stdout
