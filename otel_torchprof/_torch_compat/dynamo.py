"""How much of a program ``torch.compile`` captures: torch's ``torch._dynamo.profiler``, over columns.

    profiler = Profiler()
    compiled = torch.compile(model, backend=fx_insert_profiling)
    with profiler.prof:
        compiled(x)
    print(profiler.results())

The counts are true: every top-level operator counts once, those that torch runs to compile do not count, neither do labels,
modules and Python frames. Torch takes two operators off its totals, since its label and its profiler used to run one each that
was none of the program's; they no longer do, and what torch 2.13 reports is too low by one per call of a graph and by one more,
and, as it takes dynamo's own region around a graph for an operator, finds nothing captured.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.batch import Batch
from otel_torchprof._profile.profile import profile
from otel_torchprof._sources.labels import record_function
from otel_torchprof._tree.compiled import GRAPH_LABEL, captured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from otel_torchprof._events.function_event import FunctionEvent

_NS_PER_US = 1000
_SHOWN_FRAMES = 3


@dataclasses.dataclass
class ProfileMetrics:
    """Operators, their time and what became of them. Not synchronized: for one thread at a time.

    The arithmetic is torch's to the letter: sums and quotients leave ``graphs`` out (a new sum has none, ``+=`` keeps the left
    one's), and whatever would be divided by less than one is divided by one.
    """

    microseconds: float = 0.0
    """Time in operators, us."""
    operators: float = 0
    fusions: float = 0
    """Operators that a graph has beyond its first."""
    graphs: int = 0
    """Calls of graphs."""

    def __iadd__(self, other: Self) -> Self:
        self.microseconds += other.microseconds
        self.operators += other.operators
        self.fusions += other.fusions
        return self

    def __add__(self, other: ProfileMetrics) -> ProfileMetrics:
        """The sum, in which no graphs are counted.

        Raises:
            AssertionError: the other one is no ProfileMetrics; as in torch.
        """
        if not isinstance(other, ProfileMetrics):
            raise AssertionError(f"Expected ProfileMetrics, got {type(other)}")  # noqa: TRY004 - as torch
        return ProfileMetrics(
            self.microseconds + other.microseconds, self.operators + other.operators, self.fusions + other.fusions
        )

    def __truediv__(self, other: Any) -> ProfileMetrics:
        """The quotient, field by field or by one whole number; divisors below one are one, and no graphs are counted."""
        if isinstance(other, int):
            other = ProfileMetrics(other, other, other)
        return ProfileMetrics(
            self.microseconds / max(1, other.microseconds),
            self.operators / max(1, other.operators),
            self.fusions / max(1, other.fusions),
        )

    def __str__(self) -> str:
        """Of a quotient: fractions as percent."""
        return f"{self.operators:4.0%} ops {self.microseconds:4.0%} time"

    def tocsv(self) -> list[float]:
        """Operators and microseconds."""
        return [self.operators, self.microseconds]


class ProfileResult:
    """What was captured, of how much in all. Not synchronized."""

    def __init__(self, captured: ProfileMetrics, total: ProfileMetrics, unique_graphs: int) -> None:
        self.captured: ProfileMetrics = captured or ProfileMetrics()
        self.total: ProfileMetrics = total or ProfileMetrics()
        self.unique_graphs: int = unique_graphs

    def __iadd__(self, other: Self) -> Self:
        """Adds another result; as in torch its calls of graphs are left out, see :class:`ProfileMetrics`."""
        self.captured += other.captured
        self.total += other.total
        self.unique_graphs += other.unique_graphs
        return self

    def percent(self) -> ProfileMetrics:
        """The captured part as fractions of the total, 0 to 1."""
        return self.captured / self.total

    def __str__(self) -> str:
        calls, operators = self.captured.graphs, f"{self.captured.operators:4}/{self.total.operators:4}"
        return f"{self.unique_graphs:2} graphs {calls:2} graph calls {operators} = {self.percent()}"

    def tocsv(self) -> list[Any]:
        """Graphs, calls of graphs, operators captured and in all, and the fractions of operators and of time."""
        counts = [self.unique_graphs, self.captured.graphs, self.captured.operators, self.total.operators]
        return [*counts, *self.percent().tocsv()]


def should_print_missing() -> bool:
    """Whether ``TORCHDYNAMO_PRINT_MISSING`` is 1."""
    return os.environ.get("TORCHDYNAMO_PRINT_MISSING") == "1"


def print_missing(stack: list[str]) -> None:
    """Prints where an operator that no graph has was called: the last three entries of the program's own, once each."""
    if any("/torch/autograd/profiler.py" in entry for entry in stack):
        return
    own = [entry for entry in stack if "<built-in" not in entry and "site-packages/torch/" not in entry]
    _print_once(f"MISSING {' >> '.join(own[-_SHOWN_FRAMES:])}")


@functools.cache
def _print_once(line: str) -> None:
    print(line)  # noqa: T201 - what it is for


class Profiler:
    """Measures how much of what runs inside ``with profiler.prof:`` was captured by ``torch.compile``.

    Only graphs that were compiled with the backend :func:`fx_insert_profiling` are seen. Under ``TORCHDYNAMO_PRINT_MISSING=1``,
    :meth:`results` prints the operators that no graph has, each once, with the Python frames around it where these were
    recorded, which they are if the variable was set when this was made.
    """

    unique_graphs: int = 0
    """Graphs that :func:`fx_insert_profiling` got since the last results, in this process."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"with_stack": True} if should_print_missing() else {}
        self.prof = profile(**options)

    def results(self) -> ProfileResult:
        """What was recorded, and starts counting unique graphs anew.

        Costs some 100 ns per event, and some microseconds where missing ones are printed.

        Raises:
            RuntimeError: the profile has not ended yet, or was not started.
        """
        batch = Batch(self.prof.columns, self.prof.names, self.prof.threads)
        found = captured(batch, graph_labels_only=True)
        if should_print_missing():
            missing = set(batch["id"][found.counts & ~found.captured].tolist())
            _print_all_missing(event for event in self.prof.events() if event.id in missing)
        duration = batch["end"] - batch["start"]
        calls, inside, total = (int(mask.sum()) for mask in (found.region, found.captured, found.counts))
        unique_graphs, Profiler.unique_graphs = Profiler.unique_graphs, 0
        return ProfileResult(
            ProfileMetrics(int(duration[found.captured].sum()) / _NS_PER_US, inside, inside - calls, calls),
            ProfileMetrics(int(duration[found.counts].sum()) / _NS_PER_US, total, total - 1),
            unique_graphs,
        )


def _print_all_missing(events: Iterable[FunctionEvent]) -> None:
    """Prints each event with the frames around it, as far as they were recorded."""
    for event in events:
        print_missing([*reversed(event.stack or ()), event.name])


def fx_insert_profiling(gm: Any, example_inputs: list[Any]) -> Callable[..., Any]:  # noqa: ARG001 - of every backend
    """A backend for ``torch.compile`` that runs a graph as it is, under the label ``TORCHDYNAMO``, and counts it as unique."""

    def wrapped(*args: Any) -> Any:
        with record_function(GRAPH_LABEL):
            return gm.forward(*args)

    Profiler.unique_graphs += 1
    return wrapped
