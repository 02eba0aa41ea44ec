"""Explanations of slow training, with the slowest steps: as data, as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._encode.table import three_digits
from otel_torchprof.errors import printable

from .findings import RULES, STRAGGLERS, Abstention, time, trained
from .steps import COUNTERS, PLACE_OF, is_operator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .findings import Finding
    from .steps import Rank

_MOST_LISTED = 5
_MOST_CAUSES = 3
SLOWER = 1.5
"""A slow step takes at least this many medians."""
_LEAST = 0.1
"""Least part of the excess of a slow step that is reported."""
_SAME = 0.8
"""Least part of the excess of a phase with which an operator replaces it."""
_MORE = 10
"""A counter is reported if it is this many times its median."""
_MOST_COMPARED = 2000


class SlowStep(NamedTuple):
    """One of the slowest steps."""

    rank: str
    number: int
    seconds: float
    ratio: float
    """Its duration divided by the median."""
    more: tuple[tuple[str, float], ...]
    """Phases and operators that took longer than in other steps, and by how many seconds: at most three, the largest first."""
    counts: tuple[tuple[str, int], ...]
    """Counters of the operating system that are ten times their medians, at most three causes in all."""


def slowest(ranks: list[Rank]) -> tuple[SlowStep, ...]:
    """The slowest training steps of all ranks, after the warm-up."""
    slow_steps = []
    for rank in ranks:
        places = np.flatnonzero(trained(rank))
        if not len(places):
            continue
        median = float(np.median(rank.seconds[places]))
        slow = places[np.argsort(-rank.seconds[places], kind="stable")][:_MOST_LISTED]
        for step in slow.tolist():
            if rank.seconds[step] > SLOWER * median:
                more, seconds = _more(rank, places, step), float(rank.seconds[step])
                counts = _counts(rank, places, step)[: _MOST_CAUSES - len(more)]
                slow_steps.append(SlowStep(rank.name, int(rank.number[step]), seconds, seconds / median, more, counts))
    return tuple(sorted(slow_steps, key=lambda step: -step.seconds)[:_MOST_LISTED])


def _more(rank: Rank, places: np.ndarray, step: int) -> tuple[tuple[str, float], ...]:
    excess = float(rank.seconds[step] - np.median(rank.seconds[places]))
    columns = {phase: rank.phases[:, place] for phase, place in PLACE_OF.items()} | {
        "not known" if rank.is_derived else "unattributed": rank.unattributed,
    }
    phases = {name: float(column[step] - np.median(column[places])) for name, column in columns.items()}
    compared = [rank.operators[place] for place in places[:: -(-len(places) // _MOST_COMPARED)].tolist()]
    operators = {}
    for operator in rank.operators[step]:
        if not operator.in_data and is_operator(operator.name):
            usual = np.median(
                [sum(other.seconds for other in others if other.name == operator.name) for others in compared]
            )
            operators[operator.name] = operator.seconds - float(usual)
    longest = max(operators, key=lambda name: operators[name], default="")
    if longest:  # one operator that is most of a phase is named instead of it
        seconds = operators[longest]
        phases = {name: more for name, more in phases.items() if not _SAME * more <= seconds <= more / _SAME}
        phases[longest] = seconds
    runnable = float(np.nan_to_num(rank.runnable[step] - np.median(rank.runnable[places])))
    phases["without a processor"] = runnable
    largest = sorted((name for name in phases if phases[name] >= _LEAST * excess), key=lambda name: -phases[name])
    return tuple((name, phases[name]) for name in largest[:_MOST_CAUSES])


def _counts(rank: Rank, places: np.ndarray, step: int) -> tuple[tuple[str, int], ...]:
    return tuple(
        (name, int(rank.counters[step, place]))
        for place, name in enumerate(COUNTERS)
        if rank.counters[step, place] > _MORE * max(1.0, float(np.median(rank.counters[places, place])))
    )


_WIDTH = 30
"""Characters of the bar of a whole step."""
_LISTED = 8
"""Most displayed reasons for no verdict; each rank may have one."""
_BLOCKS = " ▏▎▍▌▋▊▉█"
_PLAIN = " #"


class PhaseRow(NamedTuple):
    """A phase in the steady steps of all ranks: seconds per step, and share of the step time."""

    phase: str
    median: float
    p95: float
    share: float


@dataclass(frozen=True)
class Explanation:
    """Verdicts about slow training with their evidence: the result of :func:`explain`. Immutable.

    ``print()`` writes the text of ``otel-torchprof explain``; a notebook displays Markdown. ``docs/verdicts.md`` lists
    the verdicts.

    Examples:
        >>> with otp.profile() as prof:
        ...     for _ in range(40):
        ...         y = torch.ones(3) + 1
        ...         prof.step()
        >>> explanation = prof.explain()
        >>> explanation.steps >= 40, len(explanation.ranks)
        (True, 1)
    """

    ranks: tuple[str, ...]
    steps: int
    steady_steps: int
    findings: tuple[Finding, ...]
    """The verdicts, ordered by the seconds that can be recovered, most first."""
    notes: tuple[Finding, ...]
    """Findings that are too small for a verdict, or have no cause."""
    abstentions: tuple[Abstention, ...]
    phases: tuple[PhaseRow, ...]
    step_median: float
    slow_steps: tuple[SlowStep, ...]
    problems: tuple[str, ...]
    """Parts of the files that could not be read."""
    knows_runnable: bool = True
    """Whether the files have the time for which the loop's thread was ready to run; without it a busy machine is not
    detected."""
    left_out_steps: int = 0
    """Number of further steps in the files that are not looked at."""
    step_rule: str = ""
    """Where steps begin and end, if the files mark none."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The verdicts that are faults: those with a severity other than ``none``."""
        return tuple(finding for finding in self.findings if finding.severity != "none")

    @property
    def headline(self) -> str:
        """The most important verdict in one line, or why there is none."""
        if self.faults:
            count = 1 + (self.faults[0].verdict == "machine-busy")  # the program's own fault is said too
            told = (
                each.sentence + ("" if each.confidence == "firm" else ", tentative") for each in self.faults[:count]
            )
            more = f" (and {len(self.faults) - count} more)" if len(self.faults) > count else ""
            return "; ".join(told) + more
        of_ranks = [abstention for abstention in self.abstentions if abstention.subject != STRAGGLERS]
        if of_ranks:
            return f"no verdict: {of_ranks[0].reason}"
        spiky = next((note for note in self.notes if note.verdict == "spikes"), None)
        if spiky is not None and spiky.share >= RULES.note_share:
            return f"no cause found; {spiky.sentence}"
        if self.findings:
            return f"no fault found; {self.findings[0].sentence}"
        return "no fault found"

    def __str__(self) -> str:
        return as_text(self)

    def _repr_markdown_(self) -> str:
        """Markdown for a notebook."""
        return as_markdown(self)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, and the thresholds of the rules, as a dictionary for the json module."""
        return {
            "verdict": self.headline,
            "ranks": list(self.ranks),
            "steps": self.steps,
            "left_out_steps": self.left_out_steps,
            "steady_steps": self.steady_steps,
            "step_median_seconds": self.step_median,
            "findings": [finding._asdict() for finding in self.findings],
            "notes": [note._asdict() for note in self.notes],
            "abstentions": [abstention._asdict() for abstention in self.abstentions],
            "phases": [row._asdict() for row in self.phases],
            "slow_steps": [
                step._asdict() | {"more": dict(step.more), "counts": dict(step.counts)} for step in self.slow_steps
            ],
            "problems": list(self.problems),
            "knows_runnable": self.knows_runnable,
            "step_rule": self.step_rule,
            "rules": RULES._asdict(),
        }


def as_text(explanation: Explanation, *, is_plain: bool = False) -> str:
    """Formats an explanation for a terminal; ``is_plain`` draws bars in ASCII."""
    blocks = [
        [] if explanation.faults or explanation.headline.startswith("no verdict") else [explanation.headline],
        *(_finding_lines(finding) for finding in explanation.findings),
        _doubts(explanation),
        [_steps_line(explanation)],
        _phase_lines(explanation, is_plain=is_plain),
        _slow_lines(explanation),
    ]
    texts = ("\n".join(map(printable, lines)) for lines in blocks)  # a name with a line feed forges no line
    return "\n\n".join(text for text in texts if text) + "\n"


def as_markdown(explanation: Explanation) -> str:
    """Formats an explanation for a pull request."""
    lines = [f"**{escaped(explanation.headline)}**", ""]
    for finding in explanation.findings:
        lines += [f"- **{escaped(finding.sentence)}** ({finding.severity}, {finding.confidence}{_on_ranks(finding)})"]
        lines += [f"  - {escaped(text)}" for text in finding.evidence]
        lines += [f"  - Next: {escaped(finding.next_action)}", f"  - Check: {escaped(finding.check)}"]
    lines += [f"- Note: {escaped(note.sentence)}" for note in explanation.notes]
    lines += [
        f"- No verdict{escaped(_of(abstention.subject, explanation))}: {escaped(abstention.reason)}"
        for abstention in explanation.abstentions[:_LISTED]
    ]
    lines += ["", escaped(_steps_line(explanation)), ""]
    if explanation.phases:
        lines += ["| Phase | Median | p95 | Share |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {row.phase} | {time(row.median)} | {time(row.p95)} | {row.share:.0%} |" for row in explanation.phases
        ]
    if explanation.slow_steps:
        titles, *rows = _slow_rows(explanation)
        lines += ["", f"| {' | '.join(titles)} |", "| --- | ---: | ---: | --- |"]
        lines += [f"| {' | '.join(map(escaped, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _doubts(explanation: Explanation) -> Iterator[str]:
    """Yields notes and reasons for no verdict."""
    for note in explanation.notes:
        yield f"note: {note.sentence}"
        yield from _evidence_lines(note)
    for abstention in explanation.abstentions[:_LISTED]:
        yield f"no verdict{_of(abstention.subject, explanation)}: {abstention.reason}"
        yield f"  next      {abstention.way_out}"
    if len(explanation.abstentions) > _LISTED:
        yield f"and {len(explanation.abstentions) - _LISTED} more reasons: --json"


def _slow_lines(explanation: Explanation) -> Iterator[str]:
    if not explanation.slow_steps:
        return
    rows = list(_slow_rows(explanation))
    width = max(len(name) for name, *_ in rows)
    for name, duration, ratio, more in rows:
        yield f"{name:<{width}}{duration:>14}{ratio:>10}  {more}".rstrip()


def _slow_rows(explanation: Explanation) -> Iterator[tuple[str, str, str, str]]:
    """Yields the titles and the rows of the table of the slowest steps; its times have one unit."""
    unit, scale = ("s", 1.0) if explanation.step_median >= 1 else ("ms", 1e3)
    yield "Slowest step", f"Duration, {unit}", "x median", f"More than usual, {unit} (may overlap)"
    for step in explanation.slow_steps:
        more = (
            *(f"{name} {three_digits(scale * seconds)}" for name, seconds in step.more),
            *(f"{count:,} {name}" for name, count in step.counts),
        )
        name = _numbered(step.rank, step.number, explanation)
        yield name, three_digits(scale * step.seconds), three_digits(step.ratio), ", ".join(more)


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.sentence}  [severity {finding.severity}, {finding.confidence}{_on_ranks(finding)}]"
    yield from _evidence_lines(finding)
    if finding.recoverable_seconds:
        of_step = f"{time(finding.step_seconds)} a step, " if finding.step_seconds else ""
        yield f"  at stake  at most {of_step}{time(finding.recoverable_seconds)} of the recording"
    yield f"  next      {finding.next_action}"
    yield f"  check     {finding.check}"


def _evidence_lines(finding: Finding) -> Iterator[str]:
    return (f"  evidence  {text}" for text in finding.evidence)


def _phase_lines(explanation: Explanation, *, is_plain: bool) -> Iterator[str]:
    if explanation.phases:
        yield f"{'Phase':<14}{'Median':>12}{'p95':>12}{'Share':>8}"
    for row in explanation.phases:
        bar = _bar(row.share, _PLAIN if is_plain else _BLOCKS)
        yield f"{row.phase:<14}{time(row.median):>12}{time(row.p95):>12}{row.share:>8.0%}  {bar}".rstrip()


def _bar(share: float, blocks: str) -> str:
    """Draws a bar for a share, precise to an eighth of a character."""
    steps = len(blocks) - 1
    eighths = round(min(max(share, 0.0), 1.0) * _WIDTH * steps)
    return blocks[-1] * (eighths // steps) + blocks[eighths % steps].strip()


def _steps_line(explanation: Explanation) -> str:
    ranks = f"{len(explanation.ranks)} ranks, " if len(explanation.ranks) > 1 else ""
    busy = "" if explanation.knows_runnable else "; whether the machine was busy is not in the file"
    rule = f"; {explanation.step_rule}" if explanation.step_rule else ""
    left = explanation.left_out_steps
    first = f" (the first of {explanation.steps + left:,})" if left else ""
    median = f", median {time(explanation.step_median)}" if explanation.steady_steps else ""
    return f"{ranks}{explanation.steps:,} steps{first}, {explanation.steady_steps:,} of them steady{median}{busy}{rule}"


def _on_ranks(finding: Finding) -> str:
    names = ", ".join(finding.ranks[:4]) + (f" and {len(finding.ranks) - 4} more" if len(finding.ranks) > 4 else "")  # noqa: PLR2004 - fit on a line
    return f", on {names}" if names else ""


def _of(subject: str, explanation: Explanation) -> str:
    return f" for {subject}" if len(explanation.ranks) > 1 else ""


def _numbered(rank: str, number: int, explanation: Explanation) -> str:
    return f"{rank} step {number}" if len(explanation.ranks) > 1 else f"step {number}"


def escaped(text: str) -> str:
    """Escapes a text from a file, so that no name in it is Markdown or HTML."""
    text = printable(text)
    for char in "\\`*_[]<>|#":
        text = text.replace(char, f"\\{char}")
    for begin in ("@", "://", "www."):  # GitHub makes mentions and links of these
        text = text.replace(begin, f"{begin[0]}<!-- -->{begin[1:]}")
    return text
