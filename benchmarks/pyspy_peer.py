"""py-spy (PyPI: py-spy), which the lines of verdicts are compared with: its runs, and the lines of the program that it puts first.

It names lines, not causes: a user looks for the fault in the lines with most samples. It is asked in the way that favours it most: for
the loop's thread alone, waits included, each sample counted for the innermost line of the program, as verdicts do.
"""

from __future__ import annotations

import linecache
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINES = 3
"""Of those with most samples, so many are noted."""
_RATE = 100
_SECONDS = 10
_FRAME = re.compile(r".* \(.*?([^/(]*):(\d+)\)")
_HERE = Path(__file__).resolve().parent


@contextmanager
def sampled(folder: Path) -> Iterator[None]:
    """Samples this process until the ``with`` block ends."""
    program = shutil.which("py-spy")
    if program is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    command = [program, "record", "--pid", str(os.getpid()), "--rate", str(_RATE), "--duration", "unlimited"]
    how = ["--format", "raw", "--full-filenames", "--threads", "--idle", "--output", str(folder / "py-spy.txt")]
    with subprocess.Popen([*command, *how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it says that it samples
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=_SECONDS)


def said(folder: Path) -> dict[str, Any]:
    """The texts of the lines of the program with most samples, most first."""
    found: Counter[tuple[str, int]] = Counter()
    for line in (folder / "py-spy.txt").read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if thread.endswith(": MainThread"):
            own = [match for match in map(_FRAME.fullmatch, frames) if match and (_HERE / match[1]).exists()]
            found.update({(match[1], int(match[2])): int(count) for match in own[-1:]})
    top = [linecache.getline(str(_HERE / file), line).strip() for (file, line), _ in found.most_common(_LINES)]
    return {"top_lines": top, "verdicts": [], "abstentions": [], "headline": f"most samples: {top}"}
