"""Measures how much of a program ``torch.compile`` captures: ``torch._dynamo.profiler``, over columns.

    profiler = Profiler()
    compiled = torch.compile(model, backend=fx_insert_profiling)
    with profiler.prof:
        compiled(x)
    print(profiler.results())

The counts are exact: every top-level operator counts once; operators that torch runs to compile, labels, modules and
Python frames do not count. Torch subtracts two operators from its totals, since its label and its profiler used to run
one each. They no longer do, so the results of torch 2.13 are too low by one per call of a graph and by one more; and
since it takes dynamo's own region around a graph for an operator, it finds nothing captured.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.batch import Batch
from otel_torchprof._model.compiled import GRAPH_LABEL, captured
from otel_torchprof._record.labels import record_function

from .profile import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from .function_event import FunctionEvent

_NS_PER_US = 1000
_SHOWN_FRAMES = 3


@dataclasses.dataclass
class ProfileMetrics:
    """Counts of operators, their time, fusions and graphs. Not thread-safe.

    The arithmetic is exactly torch's: sums and quotients leave ``graphs`` out (a new sum has none, ``+=`` keeps the
    left one's), and a divisor below one is replaced by one.
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
        """Adds two counts; graphs are not counted.

        Raises:
            AssertionError: the other one is not a ProfileMetrics; torch's error.
        """
        if not isinstance(other, ProfileMetrics):
            raise AssertionError(f"Expected ProfileMetrics, got {type(other)}")  # noqa: TRY004 - as torch
        return ProfileMetrics(
            self.microseconds + other.microseconds, self.operators + other.operators, self.fusions + other.fusions
        )

    def __truediv__(self, other: Any) -> ProfileMetrics:
        """Divides field by field, or by an int; divisors below one are one, and graphs are not counted."""
        if isinstance(other, int):
            other = ProfileMetrics(other, other, other)
        return ProfileMetrics(
            self.microseconds / max(1, other.microseconds),
            self.operators / max(1, other.operators),
            self.fusions / max(1, other.fusions),
        )

    def __str__(self) -> str:
        """Formats a quotient: fractions as percent."""
        return f"{self.operators:4.0%} ops {self.microseconds:4.0%} time"

    def tocsv(self) -> list[float]:
        """Operators and microseconds."""
        return [self.operators, self.microseconds]


class ProfileResult:
    """Captured and total counts. Not thread-safe."""

    def __init__(self, captured: ProfileMetrics, total: ProfileMetrics, unique_graphs: int) -> None:
        self.captured: ProfileMetrics = captured or ProfileMetrics()
        self.total: ProfileMetrics = total or ProfileMetrics()
        self.unique_graphs: int = unique_graphs

    def __iadd__(self, other: Self) -> Self:
        """Adds another result; as in torch its calls of graphs are not counted, see :class:`ProfileMetrics`."""
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
    """Prints where an operator outside of graphs was called: the last three stack entries of the program, once each."""
    if any("/torch/autograd/profiler.py" in entry for entry in stack):
        return
    own = [entry for entry in stack if "<built-in" not in entry and "site-packages/torch/" not in entry]
    _print_once(f"MISSING {' >> '.join(own[-_SHOWN_FRAMES:])}")


@functools.cache
def _print_once(line: str) -> None:
    print(line)  # noqa: T201 - what it is for


class Profiler:
    """Measures how much of the work inside ``with profiler.prof:`` ``torch.compile`` has captured.

    Only graphs of the backend :func:`fx_insert_profiling` count as captured. With ``TORCHDYNAMO_PRINT_MISSING=1``,
    :meth:`results` prints each operator outside of graphs once, with its Python stack if the variable was set when this
    object was created.
    """

    unique_graphs: int = 0
    """Graphs that :func:`fx_insert_profiling` received since the last results, in this process."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"with_stack": True} if should_print_missing() else {}
        self.prof = profile(**options)

    def results(self) -> ProfileResult:
        """Returns the counts and resets the number of unique graphs.

        Costs about 100 ns per event, and some microseconds per printed operator.

        Raises:
            RuntimeError: the profile has not ended, or was not started.
        """
        batch = Batch(self.prof.columns, self.prof.names, self.prof.threads)
        selection = captured(batch, graph_labels_only=True)
        if should_print_missing():
            missing = set(batch["id"][selection.counts & ~selection.captured].tolist())
            _print_all_missing(event for event in self.prof.events() if event.id in missing)
        duration = batch["end"] - batch["start"]
        calls, inside, total = (int(mask.sum()) for mask in (selection.region, selection.captured, selection.counts))
        unique_graphs, Profiler.unique_graphs = Profiler.unique_graphs, 0
        return ProfileResult(
            ProfileMetrics(int(duration[selection.captured].sum()) / _NS_PER_US, inside, inside - calls, calls),
            ProfileMetrics(int(duration[selection.counts].sum()) / _NS_PER_US, total, total - 1),
            unique_graphs,
        )


def _print_all_missing(events: Iterable[FunctionEvent]) -> None:
    """Prints each event with its recorded stack."""
    for event in events:
        print_missing([*reversed(event.stack or ()), event.name])


def fx_insert_profiling(gm: Any, example_inputs: list[Any]) -> Callable[..., Any]:  # noqa: ARG001 - of every backend
    """Backend for ``torch.compile`` that runs a graph unchanged under the label ``TORCHDYNAMO`` and counts it."""

    def wrapped(*args: Any) -> Any:
        with record_function(GRAPH_LABEL):
            return gm.forward(*args)

    Profiler.unique_graphs += 1
    return wrapped
