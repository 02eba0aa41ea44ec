"""Four ranks under torchrun, forked by its agent, which is a fork of a process that has torch and this package: each begins with both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import preloaded

if TYPE_CHECKING:
    import subprocess

HERE = Path(__file__).resolve().parent
RANKS = 4
_AGENT = """
import importlib, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

settings = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=int(sys.argv[3]), run_id="none", rdzv_backend="c10d",
    rdzv_endpoint="localhost:0", start_method="fork",
)

def run(folder):
    importlib.import_module(sys.argv[1]).main(folder)

elastic_launch(settings, run)(sys.argv[2])
"""
"""What ``torch.distributed.run`` does with these settings, but for the interpreters, which it starts by its command line."""


def launched(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``main(folder)`` of a module of this folder on each rank."""
    path = os.pathsep.join((str(HERE.parents[1]), str(HERE)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = (program, str(folder), str(RANKS))
    return preloaded.run(_AGENT, *words, environment=environment, folder=folder, timeout=240, has_package=True)
