"""A report: what is known of a recording, or of two, as one value for the json module, from which the page is made."""

from __future__ import annotations

from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._answers.step_series import step_series
from otel_torchprof._answers.verdicts import explained
from otel_torchprof._model.call_tree import FOLDED, joined_trees
from otel_torchprof.errors import TorchProfError
from otel_torchprof.version import __version__

from .call_sums import COLUMNS, KINDS, add_rows, averages_of, memory_curves, sampled_tree, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from otel_torchprof._answers.difference import Difference
    from otel_torchprof._answers.explanation import Explanation
    from otel_torchprof._answers.steps import Rank
    from otel_torchprof._columns.samples import Samples
    from otel_torchprof._model.call_tree import CallTree
    from otel_torchprof._model.step_spans import RecordedStep

    from .call_sums import Keys, Rows
    from .events import EventList
    from .function_event import FunctionEvent

MOST_NODES = 16_000
"""Nodes of a flame graph; the smallest of more are folded."""
MOST_ROWS = 1_500
"""Rows of a table; the last ones of more are folded."""


_FIRST_YEAR = 2000
"""Times before it are no times of day."""


class ExplainedSteps(NamedTuple):
    """The steps of a recording with what is said of them, or why there are none."""

    ranks: list[Rank]
    explanation: Explanation | None = None
    reason: str = ""

    @classmethod
    def of(cls, read: Callable[[], tuple[list[Rank], list[str]]]) -> ExplainedSteps:
        """The steps that a function reads: it returns ranks and problems, or raises TorchProfError if there are no steps."""
        try:
            ranks, problems = read()
        except TorchProfError as error:
            return cls([], None, str(error))
        return cls(ranks, explained(ranks, problems))


class Summed(NamedTuple):
    """The parts of a profile that are summed."""

    events: EventList[FunctionEvent]
    total: int
    """Number of events, those included that the list does not display."""
    steps: Sequence[RecordedStep]
    samples: Samples | None
    window: tuple[int, int]
    """Start and end, Unix ns."""


class RecordingSums:
    """The sums of one recording, which may be several files: of ranks, or of a series. Not thread-safe.

    Args:
        name: of the recording.
        paths: by path of a file, its name in the page, which others read elsewhere.
    """

    def __init__(self, name: str, paths: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = name
        self._paths = paths
        self.keys: Keys = {}
        self._trees: list[CallTree] = []
        self._sampled: list[CallTree] = []
        self.tables: dict[str, Rows] = {}
        self.memory: list[dict[str, Any]] = []
        self.requests: dict[str, Any] | None = None
        """Those of a service, of a recording without steps."""
        self.notes: list[str] = []
        self.problems: list[str] = []
        """Notes of files that could not be read completely."""
        self.events = 0
        self._window: tuple[int, int] | None = None

    def add(self, profile: Summed, notes: Iterable[str] = (), name: str = "") -> None:
        """Adds the sums of a profile; ``name`` is that of its file, if there are several.

        Raises:
            TorchProfError: its events were edited.
        """
        source = profile.events._columns()  # noqa: SLF001 - nothing but the columns behind the list is read
        if source is None:
            raise TorchProfError("the events of the profile were edited: a report needs those that were recorded")
        self.events += profile.total
        self._trees.append(tree_of(source, self.keys))
        if profile.samples is not None and len(profile.samples):
            self._sampled.append(sampled_tree(profile.samples, self.keys))
        for group, rows in averages_of(profile.events):
            add_rows(self.tables.setdefault(group, {}), rows)
        curves = memory_curves(source.batch, [(step.number, step.start, step.end) for step in profile.steps])
        self.memory += [curve | ({"file": name} if name else {}) for curve in curves]
        self.notes += notes
        start, end = profile.window
        first, last = self._window or profile.window
        self._window = min(first, start), max(last, end)

    def named(self, text: str) -> str:
        """A text with the names of files for their paths."""
        for path, name in self._paths.items():
            text = text.replace(path, name)
        return text

    def trees(self) -> list[tuple[str, str, CallTree]]:
        """Id, title and sums of each tree."""
        found = [("calls", "Recorded calls", joined_trees(self._trees))]
        return [*found, ("samples", "Sampled Python stacks", joined_trees(self._sampled))] if self._sampled else found

    def about(self) -> dict[str, Any]:
        """What the head of the page says of it."""
        start, end = self._window or (0, 0)
        began = datetime.fromtimestamp(start // 10**9, timezone.utc)
        return {
            "name": self.name,
            "events": self.events,
            "began": f"{began:%Y-%m-%d %H:%M:%S} UTC" if began.year >= _FIRST_YEAR else None,
            "duration": (end - start) // 1000,
        }


# ---- the value ----


def report_of(recording: RecordingSums, steps: ExplainedSteps) -> dict[str, Any]:
    """The report of one recording."""
    report = _report([recording], _answer(steps.explanation))
    if steps.ranks:
        report["steps"] = step_series(steps.ranks)
    report["requests"] = recording.requests
    report["memory"] = recording.memory
    return _with_reasons(report, recording.named(steps.reason))


def report_of_two(
    before: RecordingSums, after: RecordingSums, series: Sequence[ExplainedSteps], difference: Difference
) -> dict[str, Any]:
    """The report of what differs between two recordings; the pictures have the columns of both."""
    answer = {
        "headline": difference.headline,
        "diff": {key: value for key, value in difference.as_json().items() if key not in {"rules", "problems"}},
    }
    report = _report([before, after], answer | {"problems": list(difference.problems)})
    sides = [f"before, {before.name}", f"after, {after.name}"]
    report["steps"] = [
        {**each, "side": side, "name": sides[side] if len(steps.ranks) == 1 else f"{sides[side]}, {each['name']}"}
        for side, steps in enumerate(series)
        for each in step_series(steps.ranks)
    ]
    report["memory"] = [
        curve | {"file": name} for name, each in zip(sides, (before, after), strict=True) for curve in each.memory
    ]
    return _with_reasons(report, "")


def _report(recordings: Sequence[RecordingSums], answer: dict[str, Any]) -> dict[str, Any]:
    first, *others = recordings
    notes = [*(note for each in recordings for note in each.notes), *answer.pop("problems", ())]
    for each in recordings:
        notes = [each.named(note) for note in notes]
    report = {
        "version": __version__,
        "files": [each.about() for each in recordings],
        "kinds": KINDS,
        **answer,
        "notes": list(dict.fromkeys(notes)),
    }
    names: Keys = {}
    trees = [_of_names(each, names) for each in recordings]
    report["trees"] = []
    for at, (name, title, tree) in enumerate(trees[0]):
        both = [tree, *(_renamed_sums(other[at][2], "before_") for other in trees[1:] if len(other) > at)]
        if others:  # the second recording is what is looked at, the first is what it is compared with
            both = [_renamed_sums(tree, "before_"), *(other[at][2] for other in trees[1:] if len(other) > at)]
        report["trees"].append({"id": name, "title": title, **_tree(joined_trees(both))})
    report["names"] = [name for name, _ in names]
    report["kind_of_name"] = [kind for _, kind in names]
    report["columns"] = list(COLUMNS)
    report["tables"] = [
        {"id": group, **_table([each.tables.get(group, {}) for each in recordings])} for group in first.tables
    ]
    return report


def _of_names(recording: RecordingSums, names: Keys) -> list[tuple[str, str, CallTree]]:
    """The trees of a recording with the numbers of names that all recordings share."""
    if not names:
        names.update(recording.keys)
        return recording.trees()
    number = np.array([names.setdefault(key, len(names)) for key in recording.keys], np.int64)
    return [(name, title, tree.renamed(number)) for name, title, tree in recording.trees()]


def _renamed_sums(tree: CallTree, prefix: str) -> CallTree:
    return tree.with_sums({f"{prefix}{name}": column for name, column in tree.own.items()})


def _tree(tree: CallTree) -> dict[str, Any]:
    """A tree as columns; those without any value are left out."""
    limited = tree.limited(MOST_NODES)
    own = {name: column for name, column in limited.own.items() if column.any()}
    folded = np.flatnonzero(limited.folded)
    return {
        "parent": limited.parent,
        "name": limited.key,
        "own": own,
        "folded": [folded, limited.folded[folded]],
        "paths": len(tree),
        "shown": int((limited.key != FOLDED).sum()),
    }


def _table(sides: Sequence[Rows]) -> dict[str, Any]:
    """Averages of one recording, or of two (the second is displayed, the first is before); the smallest of many are one row."""
    shown = sides[-1]
    keys = sorted(dict.fromkeys(key for side in reversed(sides) for key in side), key=lambda key: -_weight(key, sides))
    kept, rest = keys[:MOST_ROWS], keys[MOST_ROWS:]
    table: dict[str, Any] = {
        "name": [name for name, _ in kept],
        "shapes": [shapes for _, shapes in kept],
        "folded": len(rest),
    }
    table["rows"] = _columns(shown, kept, rest)
    if len(sides) > 1:
        table["before"] = _columns(sides[0], kept, rest)
    return table


def _columns(rows: Rows, kept: Sequence[tuple[str, str]], rest: Sequence[tuple[str, str]]) -> list[list[int]]:
    """By column, the values of the rows that are kept, and the sum of the others if there are any."""
    none = [0] * len(COLUMNS)
    values = [rows.get(key, none) for key in kept]
    if rest:
        values.append([sum(column) for column in zip(*(rows.get(key, none) for key in rest), strict=True)])
    return [list(column) for column in zip(*values, strict=True)]


def _weight(key: tuple[str, str], sides: Sequence[Rows]) -> int:
    places = [list(COLUMNS).index(name) for name in ("self", "self_device")]
    return max(abs(side[key][place]) for side in sides if key in side for place in places)


def _answer(explanation: Explanation | None) -> dict[str, Any]:
    if explanation is None:
        return {"headline": ""}
    answer = explanation.as_json()
    for key in ("findings", "notes"):
        answer[key] = [each._asdict() | {"sentence": each.sentence} for each in getattr(explanation, key)]
    del answer["rules"]
    return {"headline": explanation.headline, "explanation": answer, "problems": answer.pop("problems")}


def _with_reasons(report: dict[str, Any], no_steps: str) -> dict[str, Any]:
    """The report with why sections are left out."""
    absent = {}
    if not report.get("steps"):
        absent["Verdict and steps"] = no_steps or "no steps"
    if len(report.get("steps", ())) <= 1:
        absent["Ranks"] = "one rank only; give the files of all ranks together"
    if not report["memory"]:
        is_of_steps = any("memory" in each for each in report.get("steps", ()))
        what = "Single allocations" if is_of_steps else "Memory over time"
        absent[what] = "no allocations in the recording: profile_memory=True records them"
    columns = report["trees"][0]["own"]
    if "flops" not in columns:
        absent["FLOPs of calls"] = "not in the recording: with_flops=True with record_shapes=True counts them"
    if "device" not in columns:
        absent["Device time"] = "no device was timed"
    report["absent"] = absent
    return report
