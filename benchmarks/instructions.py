"""How many instructions one operator takes: counted by valgrind's callgrind, the same on a busy machine as on a quiet one.

Run as a program it is one contestant: ``valgrind --tool=callgrind --instr-atstart=no python benchmarks/instructions.py WHO [shapes]``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import peers
from children import environment
from harness import EMPTY, KINETO, NONE, OURS, Budget, Row, rows, share_above_floor
from recorders import empty_callback, kineto, ours

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness import Recorder, Settings

_WARM_UP, _COUNT = 200, 2_000
_WHO = (NONE, EMPTY, OURS, KINETO)
_RECORDERS: Mapping[str, Recorder] = {EMPTY: empty_callback, OURS: ours, KINETO: kineto}


def measure(_settings: Settings) -> list[Row]:
    """From a C++ loop, without shapes and with, each contestant in a process of its own; some ten minutes."""
    what = "instructions of one operator, C++ loop"
    if shutil.which("valgrind") is None or not peers.load().peers_can_count():
        return [Row(what, OURS, (), "", absent="valgrind, or its header callgrind.h, is not here")]
    table: list[Row] = []
    for suffix in ("", ", with shapes"):
        counts = {who: _count(who, suffix) for who in _WHO}
        added = {who: [counts[who] - counts[NONE]] for who in _WHO[1:]}
        table += rows(f"{what}{suffix}, added", "", added, {OURS: Budget(KINETO, 0.38 if suffix else 0.37)})
        table.append(share_above_floor(f"{what}{suffix}, added", added, 0.2 if suffix else 0.1))
    return table


def _count(who: str, suffix: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        done = subprocess.run(
            [*command, sys.executable, __file__, who, *suffix.split()[-1:]],
            capture_output=True,
            text=True,
            check=True,
            env=environment(),
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise RuntimeError(f"valgrind counted nothing; it said {done.stderr[-1000:]}")
    return int(found[1]) / _COUNT


def main(who: str, *options: str) -> None:
    """Counts one contestant's instructions; callgrind prints them."""
    recorder = _RECORDERS.get(who)
    with recorder(shapes="shapes" in options) if recorder else contextlib.nullcontext():
        peers.load().peers_operators(_WARM_UP)
        peers.load().peers_operators_counted(_COUNT)


if __name__ == "__main__":
    main(*sys.argv[1:])
