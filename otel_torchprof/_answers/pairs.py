"""Compares two programs whose runs alternate: each pair of runs, one of either, has the machine of the same minutes.

The two runs of a pair differ by what changes from run to run, and by the change of the program. Without the latter, either could
have been the other's: swapping the two of a pair changes the sign of the logarithms of its ratios, and every combination of
signs is as likely as the one observed. The distribution of the largest statistic of all names over these combinations gives the
limit that chance exceeds in 5 % of comparisons, whatever the number of names and however they depend on one another (Westfall
and Young, Resampling-Based Multiple Testing, 1993; sign flips: Winkler et al., NeuroImage 92, 2014). A sign or rank test of each
name with a correction for 20 names could find nothing in ten pairs: its least p-value is 2/1024. The statistic is Student's,
the mean of the pairs over its standard error, with a tenth of the variance of a typical name added: of many names with few
pairs, some vary little by chance (Tusher et al., PNAS 98, 2001).

What the machine did shows in all names, and in the time of a fixed calculation beside the runs. The part of a difference that is
proportional to these, from pair to pair, is subtracted first; it has the same sign changes, so the limit holds for the rest.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_torchprof.errors import TorchProfError

from .diff import STEP, undisturbed, with_processor
from .difference import Change, ComparedRecording, Difference, Rounds
from .findings import DIFF_RULES, RULES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_torchprof._columns.arrays import Floats

    from .diff import Side

FEWEST_PAIRS = 6
"""Of fewer pairs there are too few combinations of signs: chance gives the most extreme of five pairs in 6 % of comparisons."""
_FASTEST = 0.05
"""Fraction of the steps, the fastest, whose time of a name is compared: the machine disturbs all others, and pairs average the rest."""
_LEVEL = 0.05
"""Share of comparisons of a program with itself that report a change."""
_COMBINATIONS = 4096
"""Most combinations of signs; of more, as many are drawn."""
_LEAST_DETECTABLE = 0.25
"""Logarithm of the least change that would be found, from which on "no difference" says too little."""
_NORMAL_QUANTILE = 1.959964
"""97.5 % of the normal distribution."""


class NameTimes(NamedTuple):
    """What the events of one name take in one run."""

    seconds: float
    """Self time per step, in the fastest twentieth of the steps with it."""
    calls: float
    """Median per step; NaN for aggregate spans."""
    path: tuple[str, ...]
    """Its path; empty if there are several, none of which has most of the time."""


class RunTimes(NamedTuple):
    """One run: a few kB, so that its files need not be kept."""

    recording: ComparedRecording
    step: float
    """Median duration of a step without waits for a processor, in seconds."""
    names: dict[str, NameTimes]
    """Names that run in at least half of the steps."""
    doubts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def run_times(side: Side) -> RunTimes:
    """Summarizes the recording of a run."""
    rows: dict[str, list[int]] = {}
    paths = side.tree.paths
    for row, path in enumerate(paths):
        rows.setdefault(path[-1] if path else STEP, []).append(row)
    names = {}
    for name, of_name in rows.items():
        times = side.tree.times(of_name)
        if (seconds := float(undisturbed(times, _FASTEST))) > 0:
            sums = [side.tree.times([row]).sum() for row in of_name]
            has_most = max(sums) >= DIFF_RULES.path_share * times.sum()
            path = paths[of_name[int(np.argmax(sums))]] if has_most else ()
            names[name] = NameTimes(seconds, side.tree.calls(of_name), path)
    step = float(np.median(with_processor(side.tree)))
    return RunTimes(side.recording, step, names, tuple(side.doubts), tuple(side.problems))


def judged_pairs(pairs: Sequence[tuple[RunTimes, RunTimes]], machine: Floats) -> Difference:
    """Compares the runs of two programs that alternated.

    Args:
        pairs: a run of the first and one of the second program; at least :data:`FEWEST_PAIRS`.
        machine: logarithms of the ratios of the times of a fixed calculation beside the runs, by pair.

    Raises:
        TorchProfError: of too few pairs, both runs had the processor in most of their steps.
    """
    count = len(pairs)
    pairs, machine = _measured(pairs, machine)
    sides = [list(runs) for runs in zip(*pairs, strict=True)]
    before, after = (_together(runs) for runs in sides)
    names = _compared(sides, before.median)
    logs = [np.log([[run.names[name].seconds for name in names] for run in runs]) for runs in sides]
    ratios = logs[1] - logs[0]
    steps = np.log([[second.step / first.step] for first, second in pairs])
    machine = machine[:, None]
    has_common = len(names) >= DIFF_RULES.fewest_names
    common = np.median(ratios, axis=1, keepdims=True) if has_common else machine
    of_all, _ = _beyond(np.hstack([steps, common]), machine)
    of_each, shifts = _beyond(ratios, _of_others(ratios) if has_common else machine)
    judged = _judged(np.hstack([of_all, of_each]))
    step, alike, *of_names = (judged.of(column) for column in range(2 + len(names)))
    changes = [
        change
        for name, shift, verdict in zip(names, shifts.tolist(), of_names, strict=True)
        if verdict.is_changed and abs((change := _change(name, sides, verdict, shift)).share) >= DIFF_RULES.least_share
    ]
    changes += _begun_or_ended(sides, before.median)
    changes.sort(key=lambda change: -abs(change.share))
    beyond = step.mean if step.is_changed else alike.mean if alike.is_changed else 0.0
    detectable = float(np.median(judged.detectable[2:] if names else judged.detectable[:1]))
    ratio, spread = math.exp(steps.mean()), math.exp(step.spread)
    rounds = Rounds(len(pairs), math.exp(machine.mean()), math.exp(beyond), math.expm1(detectable))
    return Difference(
        before,
        after,
        ratio,
        ratio / spread,
        ratio * spread,
        math.exp(common.mean()),
        tuple(changes),
        tuple(dict.fromkeys(problem for runs in sides for run in runs for problem in run.problems)),
        tuple(_doubts(sides, detectable, is_changed=bool(changes or beyond))),
        tuple(_caveats(before, after, unmeasured=count - len(pairs))),
        rounds=rounds,
    )


class _Verdict(NamedTuple):
    """Of one name."""

    is_changed: bool
    mean: float
    """Logarithm of the ratio."""
    spread: float
    """Half of its 95 % interval (Student's)."""


class _Judged(NamedTuple):
    """Of all names together."""

    chance: Floats
    """Share of the combinations of signs in which any name has a statistic as large as this name's."""
    mean: Floats
    error: Floats
    detectable: Floats
    """Least mean that would not be chance beside the names that did not change."""
    pairs: int

    def of(self, column: int) -> _Verdict:
        """The verdict of one name."""
        spread = _student(self.pairs - 1) * self.error.item(column)
        return _Verdict(self.chance.item(column) <= _LEVEL, self.mean.item(column), spread)


def _judged(values: Floats) -> _Judged:
    """Compares the statistics of names with the largest ones of all combinations of signs; ``values``: by pair and name."""
    count = len(values)
    signs = _signs(count)
    squares: Floats = (values**2).mean(axis=0)  # which no change of signs alters
    means = signs @ values / count
    variances: Floats = np.maximum(squares - means**2, _TINY)
    errors = np.sqrt(variances / (count - 1))
    moderated = np.hypot(errors, np.sqrt(_TYPICAL_PART * np.median(squares) / count))
    statistics = np.abs(means) / moderated
    largest: Floats = np.sort(statistics.max(axis=1))
    chance = 1 - np.searchsorted(largest, statistics[0] * (1 - _ROUNDING)) / len(signs)
    of_chance: Floats = np.sort(statistics[:, chance > _LEVEL].max(axis=1, initial=0))
    least = of_chance.item(-max(int(_LEVEL * len(signs)), 1))
    return _Judged(chance, means[0], errors[0], least * moderated[0], count)


_TYPICAL_PART = 0.1
"""Part of the variance of a typical name that is added to that of each."""
_TINY, _ROUNDING = 1e-20, 1e-9


def _signs(count: int) -> Floats:
    """Combinations of signs by row, the observed one first; the opposite of each has the same statistics, and is left out."""
    if 2 ** (count - 1) <= _COMBINATIONS:
        rows = np.array(list(itertools.product((1.0, -1.0), repeat=count - 1)))
        return np.hstack([np.ones((len(rows), 1)), rows])
    drawn = np.random.default_rng(0).choice((1.0, -1.0), (_COMBINATIONS, count))
    drawn[0] = 1
    return drawn


def _of_others(ratios: Floats) -> Floats:
    """The median of all other names, by pair and name: a name does not explain itself."""
    return np.stack([np.median(np.delete(ratios, name, axis=1), axis=1) for name in range(ratios.shape[1])], axis=1)


def _beyond(values: Floats, common: Floats) -> tuple[Floats, Floats]:
    """Subtracts what is proportional to a common change, a part of it from none to all; returns the rest and the mean that it subtracted."""
    part: Floats = np.clip((values * common).sum(axis=0) / np.maximum((common**2).sum(axis=0), _TINY), 0, 1)
    return values - common * part, (common * part).mean(axis=0)


def _student(freedom: int) -> float:
    """97.5 % of Student's t distribution, within 0.2 % from 5 degrees on (Abramowitz and Stegun, 26.7.5)."""
    z = _NORMAL_QUANTILE
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


# ---- runs to names ----


def _measured(
    pairs: Sequence[tuple[RunTimes, RunTimes]], machine: Floats
) -> tuple[list[tuple[RunTimes, RunTimes]], Floats]:
    """The pairs whose steps took some time: without its waits for a processor, a step may have taken none."""
    rows = [row for row, runs in enumerate(pairs) if all(run.step > 0 for run in runs)]
    if len(rows) < FEWEST_PAIRS:
        raise TorchProfError(
            f"{len(pairs) - len(rows)} of {len(pairs)} pairs have a run whose loop waited for a processor throughout most steps, "
            f"and {FEWEST_PAIRS} others are needed: compare on a machine with fewer neighbours, or with longer steps"
        )
    return [pairs[row] for row in rows], machine[rows]


def _together(runs: list[RunTimes]) -> ComparedRecording:
    """The steps of all runs of one program."""
    steps = [run.recording.steps for run in runs]
    rare, runnable = (
        float(np.average([getattr(run.recording, field) for run in runs], weights=steps))
        for field in ("rare", "runnable")
    )
    return ComparedRecording(runs[0].recording.path, sum(steps), _step(runs), rare, runnable)


def _step(runs: list[RunTimes]) -> float:
    return _mean([run.step for run in runs])


def _mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _compared(sides: list[list[RunTimes]], step: float) -> list[str]:
    """Names in all runs with at least a minimal share of a step in those of either side."""
    of_runs = [set(run.names) for runs in sides for run in runs]
    return [
        name
        for name in sides[0][0].names
        if all(name in names for names in of_runs)
        and max(_seconds(runs, name) for runs in sides) >= DIFF_RULES.least_share * step
    ]


def _seconds(runs: list[RunTimes], name: str) -> float:
    return _mean([run.names[name].seconds for run in runs])


def _begun_or_ended(sides: list[list[RunTimes]], step: float) -> list[Change]:
    """Names with at least a minimal share of a step in all runs of one side, and in none of the other."""
    changes = []
    for at, sign in ((0, -1), (1, 1)):
        others = {name for run in sides[1 - at] for name in run.names}
        for name in set.intersection(*(set(run.names) for run in sides[at])) - others:
            seconds, calls = _seconds(sides[at], name), _calls(sides[at], name)
            if seconds < DIFF_RULES.least_share * step:
                continue
            both = ((seconds, 0.0), (calls, 0.0)) if sign < 0 else ((0.0, seconds), (0.0, calls))
            path = sides[at][0].names[name].path
            changes.append(Change(name, path, *both[0], math.nan, math.nan, *both[1], sign * seconds / step))
    return changes


def _calls(runs: list[RunTimes], name: str) -> float:
    return float(np.median([run.names[name].calls for run in runs]))


def _change(name: str, sides: list[list[RunTimes]], beyond: _Verdict, alike: float) -> Change:
    """A name that changed beyond a part ``alike`` of the logarithm of its ratio, which may be due to the machine."""
    before, after = (_seconds(runs, name) for runs in sides)
    low, high = (math.exp(beyond.mean + alike + sign * beyond.spread) for sign in (-1, 1))
    calls = [_calls(runs, name) for runs in sides]
    share = (after / math.exp(alike) - before) / _step(sides[0])
    return Change(name, sides[0][0].names[name].path, before, after, low, high, calls[0], calls[1], share)


def _doubts(sides: list[list[RunTimes]], detectable: float, *, is_changed: bool) -> Iterator[str]:
    """Why the times are not the programs', or too different from run to run."""
    yield from dict.fromkeys(doubt for runs in sides for run in runs for doubt in run.doubts)
    if not is_changed and detectable > _LEAST_DETECTABLE:
        yield (
            f"runs of one command differ by so much that only a typical operator that is {math.expm1(detectable):.0%} slower would "
            "be found: more rounds, more steps per run, or a machine with fewer neighbours"
        )


def _caveats(*recordings: ComparedRecording, unmeasured: int) -> Iterator[str]:
    """How busy the machine was."""
    if unmeasured:
        yield f"pairs left out: {unmeasured}, as the loop of a run waited for a processor throughout most steps"
    busy = max(recording.runnable for recording in recordings)
    if busy > RULES.most_runnable:
        yield (
            f"the loop's thread was ready to run for {busy:.0%} of the time, and other threads had the processors; steps are "
            "compared without that time, names by the fastest twentieth of the steps"
        )
