"""Shares of lines in samples of Python stacks beside those that the lines' own clocks tell, and what a sample costs.

    python benchmarks/sampling.py [--seconds 20] [--rate 100] [--only shares|cost]

Needs no torch for the shares: run it under each interpreter. Wants a quiet machine: where the processors are busy, the
sampler waits for one as well, and sees the loop more often where that waits too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib  # noqa: F401 - of the lines
import os
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DATA, _NUMBERS = bytes(1 << 20), list(range(40_000))


def _squares(count: int) -> int:
    total = 0
    for i in range(count):
        total += i * i
    return total


def _fibonacci(n: int) -> int:
    return n if n < 2 else _fibonacci(n - 1) + _fibonacci(n - 2)


def _items(count: int) -> Iterator[int]:
    yield from (i for i in range(count))


_CASES = {
    "pure Python": {
        "loop": "_squares(12_000)",
        "recursion": "_fibonacci(14)",
        "generators": "sum(_items(4_000))",
        "inline": "[i * i for i in range(3_000)]",
    },
    "native code": {
        "sleeps": "time.sleep(1e-3)",
        "holds the lock": "sorted(_NUMBERS)",
        "gives up the lock": "hashlib.sha256(_DATA)",
        "Python beside it": "_squares(12_000)",
    },
    "lines of 50 us": {
        "blocks": "sum(_NUMBERS[:5_000])",
        "sleeps": "time.sleep(5e-5)",
        "loop": "_squares(900)",
        "recursion": "_fibonacci(9)",
        "copies": "_NUMBERS[:16_000]",
    },
}
"""Lines of a loop, by name. Each is timed."""


def _loop(lines: dict[str, str]) -> Callable[[float], dict[str, float]]:
    """A function that runs the lines until a time has come, and returns the seconds of each."""
    text = "def loop(until):\n    spent = dict.fromkeys(names, 0.0)\n    while True:\n        at = clock()\n"
    for name, line in lines.items():
        text += f"        {line}\n        now = clock(); spent[{name!r}] += now - at; at = now\n"
    text += "        if now > until: return spent\n"
    space = {**globals(), "clock": time.perf_counter, "names": list(lines)}
    exec(compile(text, "loop.py", "exec"), space)  # noqa: S102 - lines with known numbers
    return space["loop"]


def shares(name: str, seconds: float, rate: float) -> float:
    """Prints the true and the sampled shares of the lines; returns the greatest difference, in points."""
    lines = _CASES[name]
    loop = _loop(lines)
    begin = time.perf_counter()
    with otp.profile(operators=False, sampling=rate) as prof:
        spent = loop(begin + seconds)
    samples = prof.samples
    by_line: Counter[int] = Counter()
    for stack, duration in zip(samples.stack.tolist(), samples.duration.tolist(), strict=True):
        here = next((call.line for call in samples.stacks[stack] if call.file == "loop.py"), 0)
        by_line[here] += duration
    whole, sampled = sum(spent.values()), samples.duration.sum()
    print(f"{name}: {len(samples)} samples, {sampled / 1e9:.2f} of {seconds:.0f} s")
    worst = 0.0
    for at, line in enumerate(lines):
        truth, share = 100 * spent[line] / whole, 100 * by_line[5 + 2 * at] / sampled
        worst = max(worst, abs(share - truth))
        print(f"  {line:20} true {truth:5.1f} %, sampled {share:5.1f} %")
    return worst


def cost(milliseconds: float, threads: int, rounds: int) -> None:
    """Prints what sampling adds to a step of so many ms on a loop's thread, while so many threads are sampled."""
    step = _step(milliseconds)
    added: dict[str, list[float]] = {"sampled": [], "nothing, twice": []}
    with _waiting(threads - 1):
        for at in range(rounds):
            order = [False, True, False] if at % 2 else [False, False, True]
            times = [_run(step, sampling) for sampling in order]
            base, again = (time for time, sampling in zip(times, order, strict=True) if not sampling)
            added["sampled"].append(100 * (times[order.index(True)] / ((base + again) / 2) - 1))
            added["nothing, twice"].append(100 * (again / base - 1))
    for name, values in added.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"step of {milliseconds:g} ms, {threads} threads, {name}: {middle:+.2f} % ({low:+.2f} .. {high:+.2f}), {rounds} times"
        )


def _step(milliseconds: float) -> Callable[[], None]:
    import torch

    x = torch.ones(64, 64)

    def part() -> None:
        _squares(400)
        y = x
        for _ in range(8):
            y = (y @ x).relu() * 0.01

    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + 0.2:
        part()
        count += 1
    each = max(1, round(milliseconds / 1e3 * count / 0.2))
    return lambda: [part() for _ in range(each)] and None


def _run(step: Callable[[], None], sampling: bool) -> float:
    """Mean seconds of a step, without the slowest fiftieth.

    Of steps of 1 ms a sample falls into every tenth: a median, or the fastest ones, would have none.
    """
    times = []
    with otp.profile(operators=False, sampling=sampling, all_threads=True):
        end = time.perf_counter() + 0.5
        while (begin := time.perf_counter()) < end:
            step()
            times.append(time.perf_counter() - begin)
    return statistics.mean(sorted(times)[: -max(1, len(times) // 50)])


@contextlib.contextmanager
def _waiting(count: int) -> Iterator[None]:
    """So many threads that are sampled while they wait."""
    done = threading.Event()

    def wait() -> None:
        with otp.profile(operators=False):
            done.wait()

    threads = [threading.Thread(target=wait) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


def processor_time(rate: float, seconds: float = 5.0) -> None:
    """Prints the processor time of the sampling thread per sample, at stacks of some depths."""
    with otp.profile(operators=False, sampling=rate) as prof:
        before = _sampler_ns()
        time.sleep(seconds)
        used = _sampler_ns() - before
    count = len(prof.samples)
    print(f"asleep: {used / count / 1e3:.1f} us of processor time a sample, with {count} samples")
    for depth in (5, 30, 100):
        with otp.profile(operators=False, sampling=rate) as prof:
            before = _sampler_ns()
            _deep(depth, seconds)
            used = _sampler_ns() - before
        count = len(prof.samples)
        print(f"{depth} calls deep: {used / count / 1e3:.1f} us of processor time a sample, with {count} samples")


def _deep(depth: int, seconds: float) -> int:
    if depth > 1:
        return _deep(depth - 1, seconds)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        _squares(1000)
    return 0


def _own_threads() -> list[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip() == "otel-torchprof"]


def _sampler_ns() -> int:
    """Processor time of the sampling thread, ns."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in _own_threads())


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--rate", type=float, default=100.0, help="samples a second")
    parser.add_argument("--rounds", type=int, default=30, help="times that each cost is measured")
    parser.add_argument("--only", choices=("shares", "cost"))
    parser.add_argument(
        "--realtime", action="store_true", help="as on a quiet machine: no other process has the processor (as root)"
    )
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}")
    if options.realtime:
        with otp.profile(operators=False):
            time.sleep(0.5)  # its thread asks for a policy of its own
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        for task in _own_threads():
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(2))
    if options.only != "cost":
        worst = max(shares(name, options.seconds, options.rate) for name in _CASES)
        print(f"greatest difference: {worst:.1f} points")
        processor_time(options.rate)
    if options.only != "shares":
        for milliseconds in (1, 4, 40):
            for threads in (1, 16):
                cost(milliseconds, threads, options.rounds)


if __name__ == "__main__":
    main()
