"""Runs the benchmarks and prints one table, in Markdown.

    python benchmarks/run.py [--quick] [--only NAME] [--rounds N] [--python PATH] [--output FILE]

Reports times, never fails on one. Wants a quiet machine: the A/A lines show how quiet it was.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from pathlib import Path

# OpenMP reads this when torch is imported, in the processes that benchmarks start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from harness import HEAD, Row, Settings

SUBJECTS = (
    "operators",
    "devices",
    "allocations",
    "labels",
    "phase_cost",
    "calls",
    "averages",
    "encode",
    "loading",
    "memory",
    "gpt2",
    "scale",
    "large",
    "delivery",
    "instrumented",
    "always_on",
    "phases",
    "tails",
    "soak",
    "outage",
    "top",
)


BY_NAME = ("attach", "instructions", "late_ranks", "verdicts")
"""Only where they are asked for: these take long, or need a tool that is not everywhere."""


def main() -> None:
    """Measures what the command line asks for."""
    options = _options()
    load = os.getloadavg()
    torch.set_num_threads(1)
    settings = Settings(quick=options.quick, rounds=options.rounds, pythons=tuple(options.python or ()))
    table: list[Row] = []
    for subject in options.only or SUBJECTS:
        begin = time.monotonic()
        table += importlib.import_module(subject).measure(settings)
        sys.stderr.write(f"{subject}: {time.monotonic() - begin:.0f} s\n")
    text = f"{_circumstances(load)}\n\n{markdown(table)}\n"
    sys.stdout.write(text)
    if options.output:
        Path(options.output).write_text(f"# Benchmarks of {time.strftime('%Y-%m-%d')}\n\n{text}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures otel-torchprof beside torch's profiler and OpenTelemetry's SDK."
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds, no recording of 10^7 events")
    parser.add_argument(
        "--only", action="append", choices=(*SUBJECTS, *BY_NAME), help="one subject; may be given several times"
    )
    parser.add_argument("--rounds", type=_positive, help="rounds per measurement, instead of each one's own number")
    parser.add_argument(
        "--python", action="append", help="another interpreter to measure calls under; may be given several times"
    )
    parser.add_argument("--output", help="file to write the page of the table to as well, in benchmarks/results")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _circumstances(load: tuple[float, float, float]) -> str:
    lines = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "processor": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} thread",
        "load average before": ", ".join(f"{value:.2f}" for value in load),
    }
    return "\n".join(f"- {key}: {value}" for key, value in lines.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def markdown(table: list[Row]) -> str:
    """The rows as a table that reads well as text too; what a row measures is said in its first line only."""
    lines = [HEAD, ("---",) * len(HEAD)]
    before = ""
    for row in table:
        what, *rest = row.cells()
        lines.append((what if what != before else "", *rest))
        before = what
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


if __name__ == "__main__":
    main()
