"""For tests on a GPU: who is left out where there is none, and the table of what was measured."""

from __future__ import annotations

import os
from pathlib import Path

import findings
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def _missing() -> str:
    """Why nothing here can run; empty where all can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built for no GPU"
    return "" if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is false"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is in this folder has the marker ``gpu``, and says why where it cannot run."""
    here = [item for item in items if HERE in item.path.parents]
    missing = _missing() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        # What torch warns of differs by machine, and is not what is tested here.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the table and writes it, where ``GPU_TABLE`` is set into the documentation too."""
    if not findings.rows:
        return
    text = findings.markdown(findings.machine())
    path = ROOT / "build" / "gpu" / "devices.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    written = [path.relative_to(ROOT).as_posix()]
    if os.environ.get("GPU_TABLE"):
        findings.fill(ROOT / "docs" / "measurements.md", text)
        written.append("docs/measurements.md")
    terminalreporter.section("measured on this GPU")
    terminalreporter.write_line(text)
    terminalreporter.write_line(f"written to {' and '.join(written)}")
