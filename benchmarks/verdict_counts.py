"""Counts verdicts on programs whose fault is known: right ones, wrong ones, and none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fault_matrix import CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from faults import Fault

_Z = 1.959964
"""Of the normal distribution, for 95 %."""
_BUSY = "machine-busy"
"""True of every run beside neighbours, where it counts as neither right nor wrong unless they are the fault."""
HEAD = ("fault", "runs", "right", "wrong verdicts", "silent", "abstained", "failed", "line right")


class Counts(NamedTuple):
    """Sums over runs."""

    runs: int = 0
    right: int = 0
    """Runs whose fault was named; of programs without one, those without a verdict."""
    right_verdicts: int = 0
    wrong_verdicts: int = 0
    silent: int = 0
    """Runs with a fault that got no verdict that counts, and no reason why there is none."""
    abstained: int = 0
    """Runs without a verdict, with a reason."""
    failed: int = 0
    lines: int = 0
    """Runs whose fault was named, and is in a line."""
    right_lines: int = 0
    """Those of them in which a right verdict names that line."""

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def counted(kind: type[Fault], run: dict[str, Any]) -> Counts:
    """What one run counts for."""
    if "failed" in run:
        return Counts(failed=1)
    found = run.get("lines", {})
    verdicts = [each for each in run["verdicts"] if not (run.get("neighbours") and each == _BUSY)]
    right, wrong = outcome(kind, run["verdicts"] if _BUSY in kind.right else verdicts, found)
    has_abstained = not verdicts and bool(run["abstentions"])
    has_none = not right and not wrong and not has_abstained
    return Counts(
        runs=1,
        right=int(bool(right) if kind.right else has_none),
        right_verdicts=right,
        wrong_verdicts=wrong,
        silent=int(has_none and bool(kind.right)),
        abstained=int(has_abstained),
        lines=int(bool(right and kind.lines)),
        right_lines=int(bool(right) and any(_names_line(kind, text) for text in found.values())),
    )


def _names_line(kind: type[Fault], text: str) -> bool:
    return any(part in text for part in kind.lines)


def outcome(kind: type[Fault], verdicts: Iterable[str], lines: Mapping[str, str]) -> tuple[int, int]:
    """How many verdicts name the fault, and how many are wrong.

    A verdict of a peer may stand for several of ours, with a bar between: it is right if one of them is. ``lines``: by verdict, the text of
    the line that it names. A gap in the fault's line is the fault: at detail ``steps``, operators are gaps.
    """
    right = wrong = 0
    for verdict in verdicts:
        meant = set(verdict.split("|"))
        is_its_gap = verdict == "python-gap" and _names_line(kind, lines.get(verdict, ""))
        right += is_its_gap or bool(meant & kind.right)
        wrong += not (is_its_gap or meant & (kind.right | kind.also))
    return right, wrong


def table(by_fault: dict[str, Counts]) -> str:
    """Markdown: a row per fault, and what follows from all."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for fault, each in by_fault.items():
        silent = "" if fault == CONTROL else each.silent
        named = f"{each.right_lines} of {each.lines}" if each.lines else ""
        counts = each.runs, each.right, each.wrong_verdicts, silent, each.abstained, each.failed
        lines.append(_line([fault, *counts, named]))
    return "\n".join([*lines, "", *_rates(by_fault)])


def _rates(by_fault: dict[str, Counts]) -> list[str]:
    found = Counts()
    for fault, each in by_fault.items():
        if fault != CONTROL:
            found = found.plus(each)
    controls = by_fault.get(CONTROL, Counts())
    both = found.plus(controls)
    return [
        f"- precision, right verdicts of all: {rate(*precision(both))}",
        f"- recall, programs with a fault whose fault is named: {rate(found.right, found.runs)}",
        f"- the same where there was no abstention: {rate(found.right, found.runs - found.abstained)}",
        f"- programs without a fault that got no verdict: {rate(controls.right, controls.runs)}",
        f"- the line is right, of faults that were named and have one: {rate(found.right_lines, found.lines)}",
    ]


def precision(counts: Counts) -> tuple[int, int]:
    """Right verdicts, of all that were given."""
    return counts.right_verdicts, counts.right_verdicts + counts.wrong_verdicts


def rate(hits: int, total: int) -> str:
    """A share with its 95 % interval."""
    if not total:
        return "none"
    low, high = wilson(hits, total)
    return f"{hits / total:.1%} ({hits} of {total}; 95 % interval {low:.1%} to {high:.1%})"


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, z = hits / total, _Z
    middle = share + z * z / (2 * total)
    half = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    whole = 1 + z * z / total
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def top_lines(runs: Iterable[dict[str, Any]], kinds: Mapping[str, type[Fault]]) -> str:
    """How often a sampler's first line, and one of those that it puts first, is the fault's, of runs whose fault is in a line."""
    having = [(run, kinds[run["program"]]) for run in runs if "failed" not in run and kinds[run["program"]].lines]
    first, among = (
        sum(any(part in text for text in run["top_lines"][:most] for part in kind.lines) for run, kind in having)
        for most in (1, None)
    )
    return (
        f"Lines of py-spy\n\n- its first line is the fault's: {rate(first, len(having))}\n"
        f"- one of its first three is: {rate(among, len(having))}\n"
    )


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
