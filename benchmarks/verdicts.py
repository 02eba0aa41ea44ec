"""How often ``explain`` names the fault that was injected into a training program, and how often it blames one that has none.

    python benchmarks/verdicts.py [--half develop|unseen] [--runs N] [--only NAME] [--steps N] [--detail NAME] [--neighbours N] [--peer traceml-ai] [--peer py-spy]

Prints a table; what was said of each run goes to build/verdicts, a line of JSON each. With peers, each run is also done
without any profiler and under each peer, and the times of their steps are compared. py-spy has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import traceml_peer
from children import environment, neighbours
from fault_child import BARE, OURS, PYSPY, TRACEML
from fault_matrix import HALVES, Program, matrix
from harness import Row, Settings
from verdict_counts import Counts, counted, precision, table, top_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).resolve().parent
_CHILD = _HERE / "fault_child.py"
_BUILD = _HERE.parent / "build"
_RESULTS = _BUILD / "verdicts"
_RUNS, _STEPS = 10, 70
_START_SECONDS, _RUN_SECONDS = 120, 90
"""Deadlines: of starting, and of each run."""


class Options(NamedTuple):
    """What the command line asks for."""

    runs: int = _RUNS
    steps: int = _STEPS
    traceml: Path | None = None
    """The command of that peer."""
    pyspy: bool = False
    keep: bool = False
    shared_machine: bool = False
    detail: str = "ops"


def measure(settings: Settings) -> list[Row]:
    """For each half: precision, recall, and controls without a verdict, in percent."""
    options = Options(settings.rounds_or(_RUNS))
    table_rows = []
    for half in HALVES:
        runs = [run for program in matrix(half) for run in runs_of(program, options)]
        by_fault = counts_of(half, runs)
        controls = by_fault.pop("no fault")
        faulty = Counts(*map(sum, zip(*by_fault.values(), strict=True)))
        shares = {
            "precision": precision(faulty.plus(controls)),
            "recall": (faulty.right, faulty.runs),
            "controls without a verdict": (controls.right, controls.runs),
        }
        for what, (hits, total) in shares.items():
            table_rows.append(Row(f"verdicts on the {half} programs: {what}", OURS, [100 * hits / max(total, 1)], "%"))
    return table_rows


def main() -> None:
    """Measures what the command line asks for."""
    arguments = _arguments()
    traceml = traceml_peer.environment(_BUILD) if TRACEML in arguments.peer else None
    options = Options(
        arguments.runs, arguments.steps, traceml, PYSPY in arguments.peer, arguments.keep, arguments.shared_machine,
        arguments.detail,
    )  # fmt: skip
    _RESULTS.mkdir(parents=True, exist_ok=True)
    how = [arguments.detail, f"beside-{arguments.neighbours}", *arguments.peer]
    path = _RESULTS / f"{arguments.half}-{'-'.join(how)}.jsonl"
    runs = []
    with neighbours(arguments.neighbours), path.open("w") as file:
        for program in _chosen(arguments.half, arguments.only):
            for run in ({**each, "neighbours": arguments.neighbours} for each in runs_of(program, options)):
                file.write(json.dumps(run) + "\n")
                file.flush()
                _tell(run)
                runs.append(run)
    text = report(arguments.half, runs)
    path.with_suffix(".md").write_text(text)
    print(text)
    sys.exit(any("failed" in run for run in runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default=HALVES[0])
    parser.add_argument("--runs", type=int, default=_RUNS, help="of each program")
    parser.add_argument("--steps", type=int, default=_STEPS, help="of each run")
    parser.add_argument(
        "--only", action="append", help="a fault, or one program: fault/model; may be given several times"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        choices=(TRACEML, PYSPY),
        help="run each program under this as well, and without anything; may be given several times",
    )
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside each run")
    parser.add_argument("--detail", choices=("steps", "ops", "frames"), default="ops", help="of the recordings")
    parser.add_argument("--keep", action="store_true", help="keep the recordings in build/verdicts")
    parser.add_argument(
        "--shared-machine",
        action="store_true",
        help="for a machine that others use: leave out how long threads waited for a processor, and so machine-busy",
    )
    return parser.parse_args()


def _chosen(half: str, only: list[str] | None) -> list[Program]:
    wanted = {name.replace(" ", "-") for name in only or ()}
    found = [each for each in matrix(half) if not wanted or wanted & {each.name, each.name.partition("/")[0]}]
    if not found:
        names = ", ".join(each.name for each in matrix(half))
        raise SystemExit(f"--only {' '.join(only or ())} is no program of the half {half}: {names}")
    return found


def runs_of(program: Program, options: Options) -> Iterator[dict[str, Any]]:
    """What was said of each run; of one that failed, why.

    Without peers one process does all runs. With them, each run has its own, and the order of the contestants turns.
    """
    every = range(options.runs)
    peers = [TRACEML] * (options.traceml is not None) + [PYSPY] * options.pyspy
    if not peers:
        yield from _of_children(program, [*every], [OURS], options)
        return
    contestants = [BARE, OURS, *peers]
    for run in every:
        first = run % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            yield from _of_children(program, [run], [contestant], options)


def _of_children(
    program: Program, runs: list[int], contestants: list[str], options: Options
) -> Iterator[dict[str, Any]]:
    _RESULTS.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{program.name.replace('/', '-')}-", dir=_RESULTS))
    job = {
        "half": program.half, "program": program.name, "runs": runs, "contestants": contestants,
        "steps": options.steps, "folder": str(folder), "keep": options.keep, "detail": options.detail,
        "shared_machine": options.shared_machine and contestants == [OURS],
    }  # fmt: skip
    if contestants == [TRACEML]:
        assert options.traceml is not None
        ranks = program.kind.ranks
        commands = [traceml_peer.command(options.traceml, folder, ranks, _CHILD, json.dumps(job))]
    else:
        commands = [[sys.executable, str(_CHILD), json.dumps(job)]] * program.kind.ranks
    found, trouble = _finished(commands, folder, _START_SECONDS + _RUN_SECONDS * len(runs))
    if contestants == [TRACEML]:
        verdicts = traceml_peer.said(folder)
        found = [each | verdicts for each in found] if verdicts else []
    yield from found
    done = {(each["run"], each["contestant"]) for each in found}
    for run, who in [(run, who) for run in runs for who in contestants if (run, who) not in done]:
        same = {"half": program.half, "program": program.name, "fault": program.fault}
        yield {**same, "run": run, "contestant": who, "failed": trouble or "it said nothing of this run"}
    if not options.keep:
        shutil.rmtree(folder)


def _finished(commands: list[list[str]], folder: Path, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What the processes of a job, one for each rank, said; and what was wrong with them."""
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    processes = []
    with contextlib.ExitStack() as stack:
        stack.callback(_stop, processes)
        for rank, command in enumerate(commands):
            output, errors = (stack.enter_context((folder / f"{rank}.{name}").open("w")) for name in ("out", "err"))
            mine = {**variables, "RANK": str(rank)}
            if command[0] != sys.executable:  # the launcher of the peer, which has packages and ranks of its own
                mine = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=errors, env=mine, cwd=folder, start_new_session=True)
            )
        trouble = _waited(processes, time.monotonic() + seconds)
    if trouble:
        trouble += "".join(f"\n{path.name}: {path.read_text()[-4000:]}" for path in sorted(folder.glob("*.err")))
    lines = (folder / "0.out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"half"')], trouble


def _waited(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Waits until all have ended, or one has failed; what was wrong, else nothing."""
    while any(each.poll() is None for each in processes):
        if time.monotonic() > deadline:
            return "the deadline passed"
        if any(each.poll() for each in processes):
            break
        time.sleep(0.05)
    states = [each.poll() for each in processes]
    return f"status {states}" if any(states) else ""


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what is left of the processes, and of those that they have started."""
    for process in processes:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def _tell(run: dict[str, Any]) -> None:
    what = run.get("failed") or run.get("headline") or f"{run['ms_per_step']:.1f} ms a step"
    sys.stderr.write(f"{run['program']} {run['run']} {run['contestant']}: {what}\n")


def counts_of(half: str, runs: list[dict[str, Any]]) -> dict[str, Counts]:
    """By fault, in the order of the matrix."""
    kinds = {each.name: each.kind for each in matrix(half)}
    found: dict[str, Counts] = defaultdict(Counts)
    for run in runs:
        found[run["fault"]] = found[run["fault"]].plus(counted(kinds[run["program"]], run))
    return dict(found)


def report(half: str, runs: list[dict[str, Any]]) -> str:
    """A table for each contestant, and what they cost."""
    parts = []
    for who in (OURS, TRACEML):
        mine = [run for run in runs if run["contestant"] == who]
        if mine:
            parts.append(f"Verdicts of {who} on the {half} programs\n\n{table(counts_of(half, mine))}\n")
    if any(run["contestant"] == PYSPY for run in runs):
        parts.append(
            top_lines(
                [run for run in runs if run["contestant"] == PYSPY], {each.name: each.kind for each in matrix(half)}
            )
        )
    costs = [f"- {who}: {_cost(runs, who)}" for who in (OURS, TRACEML, PYSPY)]
    if any(run["contestant"] == BARE for run in runs):
        parts.append("Added to the median step, paired with the run without a profiler\n\n" + "\n".join(costs) + "\n")
    return "\n".join(parts)


def _cost(runs: list[dict[str, Any]], who: str) -> str:
    times = {(run["program"], run["run"], run["contestant"]): run["ms_per_step"] for run in runs if "failed" not in run}
    pairs = [
        (bare, times[program, run, who])
        for (program, run, contestant), bare in times.items()
        if contestant == BARE and (program, run, who) in times
    ]
    if not pairs:
        return "none"
    added = [after - before for before, after in pairs]
    percent = [100 * (after - before) / before for before, after in pairs]
    return (
        f"{statistics.median(added):.2f} ms, {statistics.median(percent):.1f} % (medians of {len(pairs)} pairs; the"
        f" median step without a profiler takes {statistics.median(before for before, _ in pairs):.1f} ms)"
    )


if __name__ == "__main__":
    main()
