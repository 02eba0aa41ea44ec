"""TraceML (PyPI: traceml-ai), which the verdicts are compared with: its environment, its runs, and what its verdicts mean.

Of a loop in plain PyTorch it has to be told where a step begins and ends (``traceml.init``, ``trace_step``); all else is
automatic. It is started by ``traceml run`` and writes ``final_summary.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from typing import TYPE_CHECKING, Any

from children import unused_port
from faults import straggler

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "0.5.0"
_STRAGGLERS = frozenset(("INPUT_STRAGGLER", "COMPUTE_STRAGGLER", "H2D_STRAGGLER", "STRAGGLER"))
_MEANING = {
    "INPUT_BOUND": "input-bound",
    "RESIDUAL_HEAVY": "python-gap|gil|gc-bound|operator-bound|checkpoint-bound|evaluation-bound",
    "H2D_BOUND": "transfer-bound",
}
"""Its verdicts as ours. Residual time may be any work of the step outside of the model, its loader and its optimizer, so that
verdict is right for each such fault. Those that are no fault (COMPUTE_BOUND, BALANCED) are left out."""
_NO_VERDICT = frozenset(("NO_DATA", "WARMUP", "INCOMPLETE_DATA"))


def environment(folder: Path) -> Path:
    """Makes a virtual environment with it, beside the torch that is here, and says where; once."""
    where = folder / f"traceml-{VERSION}"
    command = where / "bin" / "traceml"
    if not command.exists():
        venv.create(where, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = where / "lib" / version / "site-packages"
        (packages / "torch_of_the_benchmarks.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [where / "bin" / "python", "-m", "pip", "install", "--quiet", f"traceml-ai=={VERSION}"]
        subprocess.run(pip, check=True)
    return command


def command(traceml: Path, logs: Path, ranks: int, script: Path, argument: str) -> list[str]:
    """The command line of one run."""
    return [
        str(traceml), "run", str(script), "--logs-dir", str(logs), "--run-name", "run", "--no-save-training-output",
        "--nproc-per-node", str(ranks), "--aggregator-port", str(unused_port()), "--master-port", str(unused_port()),
        "--args", argument,
    ]  # fmt: skip


def said(logs: Path) -> dict[str, Any] | None:
    """Its verdicts, as ours are noted; nothing if it wrote none."""
    path = logs / "run" / "final_summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text())
    issues = [
        each for each in summary["step_time"]["issues"] if each["kind"] in _STRAGGLERS or each["kind"] in _MEANING
    ]
    primary = summary["primary_diagnosis"]
    kind = summary["step_time"]["diagnosis"]["kind"]
    return {
        "verdicts": [_MEANING.get(each["kind"]) or straggler(each["ranks"][0]) for each in issues],
        "sentences": [f"{each['status']}: {each['summary']}" for each in issues],
        "headline": f"{primary['status']}: {primary['summary']}",
        "notes": [f"{part}: {summary[part]['diagnosis']['status']}" for part in ("system", "process", "step_memory")],
        "abstentions": [primary["summary"]] if kind in _NO_VERDICT else [],
        "steady_steps": primary["evidence"].get("steps_analyzed"),
    }
