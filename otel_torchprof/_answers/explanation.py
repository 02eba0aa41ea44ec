"""Explanations of slow training, with the slowest steps: as data, as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof.errors import printable

from .findings import RULES, STRAGGLERS, Abstention, time, trained
from .steps import COUNTERS, PLACE_OF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .findings import Finding
    from .steps import Rank

_SHOWN = 5
_SLOWER = 1.5
"""Medians: below that, a step is no slow one."""
_LEAST = 0.1
"""Of what a slow step took beyond the median: less is not worth a word."""
_MORE = 10
"""Times as many as usual: fewer page faults or context switches are not worth a word."""
_MOST_COMPARED = 2000


class SlowStep(NamedTuple):
    """One of the slowest."""

    rank: str
    number: int
    seconds: float
    differences: tuple[str, ...]
    """What it had that others had not, the largest first."""


def slowest(ranks: list[Rank]) -> tuple[SlowStep, ...]:
    """The slowest training steps of all ranks, after the warm-up."""
    found = []
    for rank in ranks:
        places = np.flatnonzero(trained(rank))
        if not len(places):
            continue
        median = float(np.median(rank.seconds[places]))
        slow = places[np.argsort(-rank.seconds[places], kind="stable")][:_SHOWN]
        found += [
            SlowStep(rank.name, int(rank.number[step]), float(rank.seconds[step]), _differences(rank, places, step))
            for step in slow.tolist()
            if rank.seconds[step] > _SLOWER * median
        ]
    return tuple(sorted(found, key=lambda step: -step.seconds)[:_SHOWN])


def _differences(rank: Rank, places: np.ndarray, step: int) -> tuple[str, ...]:
    excess = float(rank.seconds[step] - np.median(rank.seconds[places]))
    columns = {phase: rank.phases[:, place] for phase, place in PLACE_OF.items()} | {
        "not known" if rank.is_derived else "unattributed": rank.unattributed,
        "runnable but not running": rank.runnable,
    }
    found = {name: float(column[step] - np.median(column[places])) for name, column in columns.items()}
    compared = [rank.operators[place] for place in places[:: -(-len(places) // _MOST_COMPARED)].tolist()]
    for each in rank.operators[step]:
        usual = np.median([sum(other.seconds for other in others if other.name == each.name) for others in compared])
        found[each.name] = each.seconds - float(usual)
    largest = sorted((name for name in found if found[name] >= _LEAST * excess), key=lambda name: -found[name])
    counted = [
        f"{rank.counters[step, place]:.0f} {name}"
        for place, name in enumerate(COUNTERS)
        if rank.counters[step, place] > _MORE * max(1.0, float(np.median(rank.counters[places, place])))
    ]
    return (*(f"{time(found[name])} more in {name}" for name in largest[:_SHOWN]), *counted)


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
        >>> found = prof.explain()
        >>> found.steps >= 40, len(found.ranks)
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

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The verdicts that are faults: those with a severity other than ``none``."""
        return tuple(each for each in self.findings if each.severity != "none")

    @property
    def headline(self) -> str:
        """The most important verdict in one line, or why there is none."""
        if self.faults:
            first = self.faults[0]
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            return first.sentence + ("" if first.confidence == "firm" else ", tentative") + more
        of_ranks = [each for each in self.abstentions if each.subject != STRAGGLERS]
        if of_ranks:
            return f"no verdict: {of_ranks[0].reason}"
        spiky = next((each for each in self.notes if each.verdict == "spikes"), None)
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
            "steady_steps": self.steady_steps,
            "step_median_seconds": self.step_median,
            "findings": [each._asdict() for each in self.findings],
            "notes": [each._asdict() for each in self.notes],
            "abstentions": [each._asdict() for each in self.abstentions],
            "phases": [each._asdict() for each in self.phases],
            "slow_steps": [each._asdict() for each in self.slow_steps],
            "problems": list(self.problems),
            "knows_runnable": self.knows_runnable,
            "rules": RULES._asdict(),
        }


def as_text(found: Explanation, *, is_plain: bool = False) -> str:
    """Formats an explanation for a terminal; ``is_plain`` draws bars in ASCII."""
    blocks = [
        [] if found.faults or found.headline.startswith("no verdict") else [found.headline],
        *(_finding_lines(each) for each in found.findings),
        _doubts(found),
        [_steps_line(found)],
        _phase_lines(found, is_plain=is_plain),
        _slow_lines(found),
    ]
    texts = ("\n".join(map(printable, lines)) for lines in blocks)  # a name with a line feed forges no line
    return "\n\n".join(text for text in texts if text) + "\n"


def as_markdown(found: Explanation) -> str:
    """Formats an explanation for a pull request."""
    lines = [f"**{escaped(found.headline)}**", ""]
    for each in found.findings:
        lines += [f"- **{escaped(each.sentence)}** ({each.severity}, {each.confidence}{_on_ranks(each)})"]
        lines += [f"  - {escaped(text)}" for text in each.evidence]
        lines += [f"  - Next: {escaped(each.next_action)}", f"  - Check: {escaped(each.check)}"]
    lines += [f"- Note: {escaped(each.sentence)}" for each in found.notes]
    lines += [
        f"- No verdict{escaped(_of(each.subject, found))}: {escaped(each.reason)}"
        for each in found.abstentions[:_LISTED]
    ]
    lines += ["", escaped(_steps_line(found)), ""]
    if found.phases:
        lines += ["| Phase | Median | p95 | Share |", "| --- | ---: | ---: | ---: |"]
        lines += [f"| {row.phase} | {time(row.median)} | {time(row.p95)} | {row.share:.0%} |" for row in found.phases]
    if found.slow_steps:
        lines += ["", "| Slowest step | Duration | What others had not |", "| --- | ---: | --- |"]
        lines += [
            f"| {escaped(_numbered(each.rank, each.number, found))} | {time(each.seconds)} | {escaped(', '.join(each.differences))} |"
            for each in found.slow_steps
        ]
    return "\n".join(lines) + "\n"


def _doubts(found: Explanation) -> Iterator[str]:
    """Yields notes and reasons for no verdict."""
    for note in found.notes:
        yield f"note: {note.sentence}; {'; '.join(note.evidence)}"
    for each in found.abstentions[:_LISTED]:
        yield f"no verdict{_of(each.subject, found)}: {each.reason}; {each.way_out}"
    if len(found.abstentions) > _LISTED:
        yield f"and {len(found.abstentions) - _LISTED} more reasons: --json"


def _slow_lines(found: Explanation) -> Iterator[str]:
    if found.slow_steps:
        yield "Slowest steps, and what others had not"
    for each in found.slow_steps:
        name = _numbered(each.rank, each.number, found)
        yield f"{name:>16}  {time(each.seconds):>10}  {', '.join(each.differences)}".rstrip()


def _finding_lines(each: Finding) -> Iterator[str]:
    yield f"{each.sentence}  [severity {each.severity}, {each.confidence}{_on_ranks(each)}]"
    for text in each.evidence:
        yield f"  evidence  {text}"
    if each.recoverable_seconds:
        yield f"  at stake  at most {time(each.recoverable_seconds)} of the recording"
    yield f"  next      {each.next_action}"
    yield f"  check     {each.check}"


def _phase_lines(found: Explanation, *, is_plain: bool) -> Iterator[str]:
    if found.phases:
        yield f"{'Phase':<14}{'Median':>12}{'p95':>12}{'Share':>8}"
    for row in found.phases:
        bar = _bar(row.share, _PLAIN if is_plain else _BLOCKS)
        yield f"{row.phase:<14}{time(row.median):>12}{time(row.p95):>12}{row.share:>8.0%}  {bar}".rstrip()


def _bar(share: float, blocks: str) -> str:
    """Draws a bar for a share, precise to an eighth of a character."""
    steps = len(blocks) - 1
    eighths = round(min(max(share, 0.0), 1.0) * _WIDTH * steps)
    return blocks[-1] * (eighths // steps) + blocks[eighths % steps].strip()


def _steps_line(found: Explanation) -> str:
    ranks = f"{len(found.ranks)} ranks, " if len(found.ranks) > 1 else ""
    busy = "" if found.knows_runnable else "; whether the machine was busy is not in the file"
    return (
        f"{ranks}{found.steps:,} steps, {found.steady_steps:,} of them steady, median {time(found.step_median)}{busy}"
    )


def _on_ranks(each: Finding) -> str:
    names = ", ".join(each.ranks[:4]) + (f" and {len(each.ranks) - 4} more" if len(each.ranks) > 4 else "")  # noqa: PLR2004 - fit on a line
    return f", on {names}" if names else ""


def _of(subject: str, found: Explanation) -> str:
    return f" for {subject}" if len(found.ranks) > 1 else ""


def _numbered(rank: str, number: int, found: Explanation) -> str:
    return f"{rank} step {number}" if len(found.ranks) > 1 else f"step {number}"


def escaped(text: str) -> str:
    """Escapes a text from a file, so that no name in it is Markdown or HTML."""
    text = printable(text)
    for char in "\\`*_[]<>|#":
        text = text.replace(char, f"\\{char}")
    for begin in ("@", "://", "www."):  # GitHub makes mentions and links of these
        text = text.replace(begin, f"{begin[0]}<!-- -->{begin[1:]}")
    return text
