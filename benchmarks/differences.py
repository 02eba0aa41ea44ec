"""How often ``diff`` says something of two recordings of one program, and how often it finds one operator that became slower.

    python benchmarks/differences.py [--pairs N] [--slower 0 0.05 0.1]
    python benchmarks/differences.py --interleave 10 [--pairs 20] [--neighbours 1] [--slower 0 0.1]

Three models train on the CPU; in each step a further operator, ``aten::cosh``, takes some tenth of it. Of a pair the second recording has
one that is slower by a part: it gets so many more elements. Recordings of a pair come one after the other, from two
processes that stay for five pairs. Prints a table; what was said of each pair goes to build/differences.jsonl.

With ``--interleave`` each pair is one ``otel-torchprof diff --interleave`` of two programs, beside processes that are always busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fault_models
import torch
from children import Child, environment, neighbours
from verdict_counts import rate

import otel_torchprof as otp

_MODELS = {"convolutions": 16, "transformer": 64, "lstm": 96}
_STEPS, _SHARE, _PAIRS_PER_PROCESS = 80, 0.12, 5
_SLOWED = "aten::cosh"
_ELEMENTS = 300_000
"""Of which it takes a tenth of a step of 6 ms of the smallest model: each program that runs by turns is given the number."""
_RESULTS = Path(__file__).resolve().parent.parent / "build" / "differences.jsonl"
_FAIL_OVER = 0.05


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=34, help="of each model and each part")
    parser.add_argument("--slower", type=float, nargs="+", default=[0.0, 0.1, 0.05])
    parser.add_argument("--interleave", type=int, metavar="N", help="rounds of each comparison of two programs")
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes beside them")
    options = parser.parse_args()
    _RESULTS.parent.mkdir(exist_ok=True)
    print(_table(_interleaved(options) if options.interleave else _of_files(options)))


def _of_files(options: argparse.Namespace) -> list[dict[str, Any]]:
    pairs = []
    with tempfile.TemporaryDirectory() as folder, _RESULTS.open("w") as file:
        for slower in options.slower:
            for model in _MODELS:
                for begin in range(0, options.pairs, _PAIRS_PER_PROCESS):
                    with Child(__file__, "--record", model) as before, Child(__file__, "--record", model) as after:
                        elements = (before.said(), after.said())[0]  # the same for both
                        for _ in range(min(_PAIRS_PER_PROCESS, options.pairs - begin)):
                            pairs.append(_pair((before, after), Path(folder), elements, model, slower))
                            file.write(json.dumps(pairs[-1]) + "\n")
                            file.flush()
    return pairs


def _interleaved(options: argparse.Namespace) -> list[dict[str, Any]]:
    pairs = []
    with neighbours(options.neighbours), _RESULTS.open("w") as file:
        for _ in range(options.pairs):
            for slower in options.slower:
                pairs.append(_rounds(options.interleave, slower))
                file.write(json.dumps(pairs[-1]) + "\n")
                file.flush()
    return pairs


def _rounds(count: int, slower: float) -> dict[str, Any]:
    commands = [[__file__, "--train", str(round(_ELEMENTS * (1 + part)))] for part in (0.0, slower)]
    words = ["diff", "--json", "--quiet", "--interleave", str(count), "--", *commands[0], "--", *commands[1]]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "otel_torchprof", *words], env=environment(), stdout=subprocess.PIPE, check=False
    )
    found = json.loads(done.stdout)
    changes = found["changes"]
    if found["rounds"]["beyond"] != 1:
        changes = [*changes, {"name": "everything", "share": found["rounds"]["beyond"] - 1}]
    return {
        "model": "convolutions",
        "slower": slower,
        "share": _SHARE,
        "changes": [found["verdict"]] if changes else [],
        "found": any(each["name"] == _SLOWED and each["share"] > 0 for each in changes),
        "others": sum(each["name"] != _SLOWED for each in changes),
        "fails": done.returncode == 1,
        "cannot": done.returncode == 3,
        "runnable": found["before"]["runnable"],
        "ratio": found["ratio"],
        "common": found["common"],
        "machine": found["rounds"]["machine"],
        "seconds": time.perf_counter() - begin,
    }


def _pair(children: tuple[Child, Child], folder: Path, elements: int, model: str, slower: float) -> dict[str, Any]:
    paths, shares = [folder / "before.json.gz", folder / "after.json.gz"], []
    for child, path, part in zip(children, paths, (0.0, slower), strict=True):
        shares.append(child.ask(json.dumps({"path": str(path), "elements": round(elements * (1 + part))})))
    begin = time.perf_counter()
    found = otp.diff(*paths)
    return {
        "model": model,
        "slower": slower,
        "share": shares[0],
        "changes": [each.sentence for each in found.changes],
        "found": any(each.name == _SLOWED and each.share > 0 for each in found.changes),
        "others": sum(each.name != _SLOWED for each in found.changes),
        "fails": found.is_slower_by(_FAIL_OVER),
        "ratio": found.ratio,
        "common": found.common,
        "seconds": time.perf_counter() - begin,
    }


def _table(pairs: list[dict[str, Any]]) -> str:
    lines = [
        "| slower by | model | pairs | share of the step | said something | found it | said something of others | --fail-over 5% failed |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for slower in dict.fromkeys(pair["slower"] for pair in pairs):
        for model in dict.fromkeys([*(pair["model"] for pair in pairs), "all"]):
            mine = [pair for pair in pairs if pair["slower"] == slower and model in {pair["model"], "all"}]
            share = statistics.median(pair["share"] for pair in mine)
            said = (sum(bool(pair[key]) for pair in mine) for key in ("changes", "found", "others", "fails"))
            cells = (f"{slower:.0%}", model, len(mine), f"{share:.1%}", *said)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    same = [pair for pair in pairs if not pair["slower"]]
    lines += [
        "",
        f"- pairs of one program of which nothing was said: {rate(sum(not p['changes'] for p in same), len(same))}",
    ]
    return "\n".join(lines)


# ---- the processes ----


def _train(elements: int) -> None:
    """A program that trains, and is recorded by who started it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loop = _Loop(fault_models.convolutions(_MODELS["convolutions"]))
    loop.buffer = torch.randn(elements)
    loop.run(_STEPS)


def _serve(model: str) -> None:
    """Records what each line asks for; answers the share of a step that the operator takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task = getattr(fault_models, model)(_MODELS[model])
    loop = _Loop(task)
    print(loop.elements_of(_SHARE), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        loop.buffer = torch.randn(asked["elements"])
        with otp.stream(otp.ChromeTraceExporter(asked["path"]), detail="ops"):
            loop.run(_STEPS)
        print(json.dumps(loop.share()), flush=True)


class _Loop:
    """A model's training with the operator in it."""

    def __init__(self, task: fault_models.Task) -> None:
        self._task = task
        self._optimizer = task.optimizer(task.model.parameters())
        self.buffer = torch.randn(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = self._task.loss(self._task.model(self._task.inputs), self._task.targets)
            with torch.no_grad():
                torch.cosh(self.buffer)
            loss.backward()
            self._optimizer.step()

    def elements_of(self, share: float) -> int:
        """How many elements take that share of a step."""
        self.run(10)
        step = self._timed(lambda: self.run(1))
        size = 100_000
        x = torch.randn(size)
        return max(1, round(size * step * share / (1 - share) / self._timed(lambda: torch.cosh(x))))

    def share(self) -> float:
        """Of a step that the operator takes now."""
        return self._timed(lambda: torch.cosh(self.buffer)) / self._timed(lambda: self.run(1))

    def _timed(self, function: Any) -> float:
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        with contextlib.suppress(KeyboardInterrupt):
            _serve(sys.argv[2])
    elif sys.argv[1:2] == ["--train"]:
        _train(int(sys.argv[2]))
    else:
        main()
