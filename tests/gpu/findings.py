"""What the tests on a GPU have measured, as one table in Markdown."""

from __future__ import annotations

import datetime as dt
import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = "<!-- measured on a GPU: begin -->"
END = "<!-- measured on a GPU: end -->"

HEAD = ("what", "of", "otel-torchprof", "torch.profiler", "difference", "allowed", "")


@dataclass(frozen=True)
class Finding:
    """Two values in microseconds, and how far they may be apart."""

    what: str
    of: str
    ours: float
    theirs: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.ours - self.theirs) <= self.allowed

    def cells(self) -> tuple[str, ...]:
        """As :data:`HEAD` has them."""
        times = (f"{value:,.2f} us" for value in (self.ours, self.theirs))
        verdict = "holds" if self.holds else "**does not hold**"
        return (self.what, self.of, *times, f"{self.ours - self.theirs:+,.2f} us", f"{self.allowed:,.2f} us", verdict)


rows: list[Finding] = []
"""In the order in which they were found."""

notes: list[str] = []
"""What is no pair of values."""


def machine() -> dict[str, str]:
    """What it was measured on."""
    import torch

    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "GPUs": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none",
        "driver": _driver(),
        "software": f"CUDA {torch.version.cuda or torch.version.hip}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "processor": _processor(),
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip().partition("\n")[0] or "unknown"


def _processor() -> str:
    from pathlib import Path

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def markdown(where: dict[str, str]) -> str:
    """The machine, the table and the notes."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    table = ["| " + " | ".join(cells) + " |" for cells in lines]
    said = [f"- {key}: {value}" for key, value in where.items()]
    return "\n".join([*said, "", *table, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def fill(page: Path, text: str) -> None:
    """Puts the text between the two marks of a page.

    Raises:
        ValueError: the page does not have them.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: the lines {BEGIN} and {END} are where the table goes, and one of them is missing")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
