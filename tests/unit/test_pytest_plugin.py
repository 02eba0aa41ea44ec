"""The fixture ``no_slower``, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest
from explained_files import Trace

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import otel_torchprof as otp

def test_steps(no_slower):
    with no_slower(over=0.05) as prof:
        for _ in range(40):
            with otp.record_function("work"):
                sum(range(1000))
            prof.step()
"""
BASELINE = "test_it.py_test_steps.json.gz"


@pytest.fixture
def project(tmp_path):
    """A project with one such test; runs it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["otel_torchprof.pytest_plugin"]\n')
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / ".torch_baselines").mkdir()

    def run(*arguments, start=preloaded.run):
        words = ("-q", "-rA", "-p", "no:cacheprovider", *arguments)
        return start(("-m", "pytest"), *words, environment={**os.environ, "PYTHONPATH": str(ROOT)}, folder=tmp_path)

    return tmp_path / ".torch_baselines", run


def started(program, *words, environment, folder):
    """As ``preloaded.run``, by a new interpreter."""
    command = [sys.executable, *program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def write(path, step_ms):
    """A baseline of steps that took so long."""
    plain = Trace().steps(60, step_ms).chrome(path.with_suffix(""))
    plain.rename(path)


def test_the_first_run_records(project):
    """Then, and when it is asked for, the trace is recorded, and nothing is compared."""
    folder, run = project
    done = run(start=started)
    assert done.returncode == 0, done.stdout
    assert f"recorded {folder / BASELINE}" in done.stdout
    write(folder / BASELINE, 1e-3)
    assert run("--record-baselines").returncode == 0
    assert (folder / BASELINE).read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(("step_ms", "status"), [(100.0, 0), (1e-3, 1)])
def test_what_it_compares_with(project, step_ms, status):
    """Steps that are faster than before pass, slower ones fail the test with what became slower, and the trace is kept."""
    folder, run = project
    write(folder / BASELINE, step_ms)
    done = run()
    assert done.returncode == status, done.stdout
    assert ("% to a step of" in done.stdout) is bool(status)
    assert (folder / BASELINE.replace(".json", ".latest.json")).exists()
