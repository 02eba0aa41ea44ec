"""Steps with samples of Python stacks, for tests of the lines that ``explain`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from explained_files import NS, Trace

from otel_torchprof._answers.rank_reading import _named, _ranks_of, steps_of
from otel_torchprof._answers.verdicts import explained
from otel_torchprof._columns.samples import Call, Samples
from otel_torchprof._files.reading import read_events

if TYPE_CHECKING:
    from pathlib import Path

    from otel_torchprof._answers.explanation import Explanation

HOME, TORCH, PYTHON = "/home/me/project", "/venv/lib/python3.11/site-packages/torch", "/usr/lib/python3.11"
MODULE = Call(f"{HOME}/train.py", 40, "<module>")


def main(line: int) -> tuple[Call, Call]:
    """The loop of a program, in a line."""
    return Call(f"{HOME}/train.py", line, "main"), MODULE


class Part(NamedTuple):
    """A part of each step: the event that it is, and the stack in it; times in ms."""

    duration: float
    stack: tuple[Call, ...]
    event: str = ""
    """Name of a phase or an operator, or of both with a slash between; none for a gap."""
    period: int = 1
    """Steps from one with it to the next."""


class SampledTrace(Trace):
    """A recording with a sample every ``interval`` ms."""

    def __init__(self, rank: int | None = None, interval: float = 1.0) -> None:
        super().__init__(rank)
        self.interval, self.samples = interval, []
        self._parents: dict[int, int] = {}

    def of_parts(self, count: int, *parts: Part) -> SampledTrace:
        """Steps of parts, one after another."""
        for number in range(count):
            begin = now = self.now
            phases = {}
            for part in parts:
                if number % part.period != part.period - 1:
                    continue
                outer, _, inner = part.event.partition("/")
                for name in filter(None, (outer, inner)):
                    self.span(name, now, part.duration)
                if inner:
                    self._parents[len(self.spans) - 1] = len(self.spans) - 2
                phase = outer.removeprefix("torch.phase.")
                if phase != outer:
                    phases[phase] = phases.get(phase, 0.0) + part.duration
                at = now + self.interval / 2
                while at < now + part.duration:
                    self.samples.append((at, part.stack))
                    at += self.interval
                now += part.duration
            self._end(now - begin, phases)
        return self

    def _parent(self, number: int) -> str:
        return f"{self._parents[number] + 1:x}" if number in self._parents else super()._parent(number)

    def _end(self, duration: float, phases: dict[str, float]) -> None:
        shares = {phase: time / duration for phase, time in phases.items()}
        self.step(duration, rest=max(1.0 - sum(shares.values()), 0.0), **{"forward": 0.0} | shares)


def explanation(folder: Path, *traces: SampledTrace) -> Explanation:
    """What is said of some ranks."""
    ranks = []
    for place, trace in enumerate(traces):
        events = read_events([str(trace.chrome(folder / f"{place}.json"))])
        stacks = list(dict.fromkeys(stack for _, stack in trace.samples))
        time = np.array([round(at * NS) for at, _ in trace.samples], np.int64)
        events.samples = Samples(
            time,
            np.full(len(time), round(trace.interval * NS)),
            np.zeros(len(time), np.int64),
            np.array([stacks.index(stack) for _, stack in trace.samples], np.int64),
            stacks,
        )
        ranks += _ranks_of(f"{place}.json", events, steps_of(f"{place}.json", events))
    return explained(_named(ranks))
