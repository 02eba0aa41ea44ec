"""``otel-torchprof show --lines``: in which lines the time of sampled threads is."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._answers.lines import folder_of, own_calls, text_of_call
from otel_torchprof._encode.table import format_time
from otel_torchprof.errors import TorchProfError, printable

if TYPE_CHECKING:
    from otel_torchprof._columns.samples import Call, Samples

_MOST_WIDE = 72


class SampledLine(NamedTuple):
    """A line in which threads were, called from another one."""

    call: Call
    """The innermost call."""
    caller: Call | None
    """The innermost call of the program's own code around it; None without."""
    samples: int
    seconds: float


def sampled_lines(samples: Samples) -> list[SampledLine]:
    """The lines of samples, the longest first. Costs some us per different stack."""
    counts, times = np.bincount(samples.stack), np.bincount(samples.stack, samples.duration)
    sums: dict[tuple[Call, Call | None], list[float]] = defaultdict(lambda: [0, 0.0])
    for at in np.flatnonzero(counts).tolist():
        if stack := samples.stacks[at]:
            caller = next(iter(own_calls(stack[1:])), None)
            entry = sums[stack[0], caller]
            entry[0] += counts.item(at)
            entry[1] += times.item(at) / 1e9
    lines = [SampledLine(*calls, int(count), seconds) for calls, (count, seconds) in sums.items()]
    return sorted(lines, key=lambda line: -line.seconds)


def text_of(samples: Samples | None, name: str, rows: int, *, as_json: bool) -> str:
    """The lines as a table, or all of them as JSON.

    Raises:
        TorchProfError: there are no samples.
    """
    if samples is None:
        raise TorchProfError(f"{name} has no samples of Python stacks; without --lines its averages are shown")
    lines = sampled_lines(samples)
    total = sum(line.seconds for line in lines)
    if as_json:
        found = [{"share": line.seconds / total if total else 0.0, **_json(line)} for line in lines]
        return json.dumps({"samples": len(samples), "seconds": total, "lines": found}, indent=1) + "\n"
    shown = lines[: None if rows < 0 else rows]
    folder = folder_of(call.file for line in lines for call in (line.call, line.caller) if call is not None)
    texts = [
        tuple("" if call is None else printable(text_of_call(call, folder)) for call in (line.call, line.caller))
        for line in shown
    ]
    width = min(max([len("Line"), *(len(text) for text, _ in texts)]), _MOST_WIDE)
    table = [f"{'Share':>7}  {'Time':>10}  {'Samples':>8}  {'Line':<{width}}  Called from"]
    for line, (text, caller) in zip(shown, texts, strict=True):
        share, time = line.seconds / total if total else 0, format_time(line.seconds * 1e6)
        table.append(f"{share:>7.1%}  {time:>10}  {line.samples:>8,}  {text:<{width}}  {caller}".rstrip())
    if len(shown) < len(lines):
        table.append(f"and {len(lines) - len(shown):,} more: --rows -1")
    table.append(f"Samples: {len(samples):,}, of {format_time(total * 1e6)}")
    return "\n".join((*table, ""))


def _json(line: SampledLine) -> dict[str, Any]:
    caller = None if line.caller is None else line.caller._asdict()
    return {"seconds": line.seconds, "samples": line.samples, **line.call._asdict(), "called_from": caller}
