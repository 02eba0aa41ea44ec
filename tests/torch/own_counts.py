"""What a training program counts and times itself, and whether the spans of torch say the same."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from opentelemetry.sdk.trace import ReadableSpan

USAGE = "torch.step.page_faults.minor"
PREFIX = "torch.phase."
UNATTRIBUTED = "unattributed"
NOT_THE_PROGRAMS = frozenset({UNATTRIBUTED, "gc", "compile"})
"""Phases that a program does not ask for, inside of those that it does."""
CLOCK_NS = 300_000
"""By which the clock of the recorder and that of a program may differ: either was set while the other was read."""
CLOSE_NS = 1_000_000
"""By how much the program's own time of a call, which is around the phase, is longer in a quarter of the steps: some us, and what
libraries do around the call; others may be interrupted between the two."""


class Timed:
    """One call that is a phase, as the program has timed it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = time.time_ns()
        self.end = self.begin
        self.inner = 0
        """ns of the phases inside."""


class Piece:
    """What the program did from one of its own marks to the next: an iteration, or something between two."""

    def __init__(self, kind: str, earliest: int) -> None:
        self.kind = kind
        self.earliest = earliest
        """It begins after this, Unix ns."""
        self.latest = 0
        """And not after this."""
        self.is_counted = kind != "training"
        self.is_last = False
        self.calls: list[Timed] = []
        """Those at top level, in order."""
        self.times: Counter[str] = Counter()
        """Exclusive times by phase, ns."""
        self.counts: Counter[str] = Counter()
        """How many calls were of each phase."""
        self.has_inner = False
        """Whether some were in others."""
        self.is_interrupted = False
        """Whether one was left by what torch calls no hook for: its phase ends when the next one begins."""

    def add(self, call: Timed, *, is_inner: bool) -> None:
        """A call that has ended."""
        self.times[call.name] += call.end - call.begin - call.inner
        self.counts[call.name] += 1
        self.has_inner |= is_inner
        if not is_inner:
            self.calls.append(call)

    def take(self, other: Piece) -> None:
        """Adds what came after it."""
        self.calls += other.calls
        self.times += other.times
        self.counts += other.counts
        self.has_inner |= other.has_inner
        self.is_interrupted |= other.is_interrupted


class Own:
    """The program's own log. For one thread.

    A program times the calls that are phases with :meth:`phase`, says with :meth:`count` that an iteration is over, and with
    :meth:`segment` what it does between two of them. ``after_call`` is called after each call.
    """

    def __init__(self, after_call: Callable[[], object] = lambda: None) -> None:
        self.iterations = 0
        self._after_call = after_call
        self.thread = threading.get_ident()
        self.pieces = [Piece("training", 0)]
        self._open: list[Timed] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a call."""
        call = Timed(name)
        self._open.append(call)
        try:
            yield
        except BaseException as error:
            # Torch does not call its hook after an optimizer's step that raises: the phase ends when the next one begins.
            self.pieces[-1].is_interrupted |= isinstance(error, KeyboardInterrupt) or name == "optimizer"
            raise
        finally:
            call.end = time.time_ns()
            self._open.pop()
            if self._open:
                self._open[-1].inner += call.end - call.begin
            self.pieces[-1].add(call, is_inner=bool(self._open))
            self._after_call()

    def count(self) -> None:
        """An iteration is over."""
        self.iterations += 1
        self.pieces[-1].is_counted = True
        self.pieces.append(Piece("training", time.time_ns()))

    def begin(self, kind: str) -> None:
        """What follows is none: an evaluation, a checkpoint; the pause before it may belong to that."""
        calls = [
            call.begin for piece in self.pieces for call in piece.calls[-1:]
        ]  # some time passes before its end is read
        self.pieces.append(Piece(kind, max(calls, default=time.time_ns())))

    def end(self) -> None:
        """The next iteration may begin."""
        self.pieces[-1].latest = time.time_ns()
        self.pieces.append(Piece("training", time.time_ns()))

    @contextmanager
    def segment(self, kind: str) -> Iterator[None]:
        """Around what is no part of an iteration."""
        self.begin(kind)
        yield
        self.end()

    # ---- the calls of a training loop, timed ----

    def batches(self, loader: Any) -> Iterator[Any]:
        """``for batch in loader``."""
        batches = iter(loader)
        while True:
            with self.phase("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def call(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        """A module; without gradients it is an evaluation where it is in eval(), else an inference."""
        with self.phase(self.kind_of(module)):
            return module(*arguments, **keywords)

    def kind_of(self, module: Any) -> str:
        """Which phase it is to call a module now."""
        if torch.is_grad_enabled():
            return "forward"
        return "inference" if module.training else "evaluation"

    def backward(self, loss: Any) -> None:
        with self.phase("backward"):
            loss.backward()

    def step(self, optimizer: Any, *arguments: Any) -> None:
        with self.phase("optimizer"):
            optimizer.step(*arguments)

    def zero(self, optimizer: Any) -> None:
        with self.phase("optimizer"):
            optimizer.zero_grad()

    def save(self, what: Any, path: Any) -> None:
        with self.phase("checkpoint"):
            torch.save(what, path)

    # ---- what is expected of spans ----

    def expected(self) -> list[Piece]:
        """Iterations and what is between them, in order, with the bounds of where each begins.

        What comes without gradients after an iteration, before the next one's first batch or pass, is between the two: the span of
        the former has it. So it is with what is left before an evaluation: a loader is asked once more than it has batches.
        """
        found: list[Piece] = []
        for piece, following in pairwise([*self.pieces, Piece("end", 0)]):
            if piece.kind == "training":
                calls = piece.calls
                while calls and calls[0].name in {"inference", "evaluation"}:
                    call = calls.pop(0)
                    piece.times[call.name] -= call.end - call.begin - call.inner
                    piece.counts[call.name] -= 1
                    if found:  # else it was before all steps
                        found[-1].add(call, is_inner=False)
                if not piece.is_counted and following.kind != "training":
                    if found:
                        found[-1].take(piece)
                        found[-1].is_last = following.kind == "end"
                    continue
                piece.latest = calls[0].end
            elif piece.calls:
                piece.latest = piece.calls[0].end
            found.append(piece)
        return found


class Segment(NamedTuple):
    """A span of a segment of the job, and those of the phases in it."""

    span: ReadableSpan
    phases: list[ReadableSpan]

    @property
    def kind(self) -> str:
        return str(self.span.attributes["torch.step.kind"])

    def times(self) -> dict[str, int]:
        """By phase, as its attributes say, in ns."""
        return _of_attributes(self.span, ".duration")

    def overlaps(self) -> dict[str, int]:
        """The same of other threads."""
        return _of_attributes(self.span, ".overlap")


def _of_attributes(span: ReadableSpan, suffix: str) -> dict[str, int]:
    return {
        key.removeprefix(PREFIX).removesuffix(suffix): round(value * 1e9)
        for key, value in span.attributes.items()
        if key.startswith(PREFIX) and key.endswith(suffix)
    }


def segments(spans: Iterable[ReadableSpan], thread: int | None = None) -> list[Segment]:
    """Those of a recording, in order, with the phases of a thread (its ident) or of all."""
    spans = sorted(spans, key=lambda span: (span.start_time, -span.end_time))
    below: dict[int, list[ReadableSpan]] = {}
    for span in spans:
        if span.name.startswith(PREFIX) and span.parent is not None and thread in {None, span.attributes["thread.id"]}:
            below.setdefault(span.parent.span_id, []).append(span)
    return [
        Segment(span, below.get(span.context.span_id, [])) for span in spans if "torch.step.kind" in span.attributes
    ]


def check(own: Own, spans: Iterable[ReadableSpan], *, learned_for: int = 0) -> list[Segment]:
    """The spans are those of the program's own log: as many, at the same places, with the same phases and times.

    ``learned_for``: iterations at the beginning that are not known for what they are.
    """
    found = [segment for segment in segments(spans, own.thread) if segment.kind != "setup"]
    steps = [segment for segment in found if segment.kind == "training"]
    expected = own.expected()[learned_for:]
    if learned_for:
        found = found[-len(expected) :]
        assert [step.span.attributes["torch.step.number"] for step in steps] == list(range(len(steps)))
    else:
        assert [step.span.attributes["torch.step.number"] for step in steps] == list(range(own.iterations))
    assert [segment.kind for segment in found] == [piece.kind for piece in expected]
    assert {step.span.name for step in steps} <= {"torch.step"}
    for number, (piece, segment) in enumerate(zip(expected, found, strict=True)):
        where = f"segment {number}, {segment.kind}"
        _check_place(piece, segment, where)
        _check_phases(piece, segment, where)
        _check_sum(segment, where)
    _check_times(expected, found)
    without = [number for number, segment in enumerate(found) if USAGE not in segment.span.attributes]
    assert set(without) <= {0, len(found) - 1}, "these have nothing that the system said of their thread"
    return found


def _check_place(piece: Piece, segment: Segment, where: str) -> None:
    begin = segment.span.start_time
    assert piece.earliest - CLOCK_NS <= begin <= piece.latest + CLOCK_NS, (
        f"{where}: begins {begin - piece.earliest} ns after what was before, {piece.latest - begin} ns before its first call ends"
    )
    for phase in segment.phases:
        assert begin <= phase.start_time <= phase.end_time <= segment.span.end_time, f"{where}: {phase.name}"


def _check_phases(piece: Piece, segment: Segment, where: str) -> None:
    """At top level they are the program's calls, in order; a phase lies in a call, or ends when the phase of the next call begins."""
    if not piece.calls:
        return  # of a library's evaluation the program has timed nothing
    names = [span.name.removeprefix(PREFIX) for span in segment.phases]
    shown = [name for name, _ in groupby(name for name in names if name not in NOT_THE_PROGRAMS)]
    own = [name for name, _ in groupby(call.name for call in piece.calls)]
    for names_of_last in (shown, own) if piece.is_last else ():
        del names_of_last[
            len(names_of_last) - (names_of_last[-1] == "data") :
        ]  # nothing follows what is no batch any more
    assert shown == own, f"{where}: {shown}, not {own}"
    ends = [call.end for call in piece.calls]
    if piece.is_interrupted:  # which is in that call: the thread may have waited for a processor since the call began
        ends = [*ends[1:], ends[-1]]
    for span, name in zip(segment.phases, names, strict=True):
        if name not in NOT_THE_PROGRAMS:
            assert any(
                call.name == name and call.begin - CLOCK_NS <= span.start_time and span.end_time <= end + CLOCK_NS
                for call, end in zip(piece.calls, ends, strict=True)
            ), f"{where}: {name}"


def _check_sum(segment: Segment, where: str) -> None:
    """With what is in none, phases are the whole duration."""
    duration = segment.span.end_time - segment.span.start_time
    assert abs(sum(segment.times().values()) - duration) <= 100, where


def _check_times(expected: list[Piece], found: list[Segment]) -> None:
    """A phase takes no longer than the program's call around it, and in most of the steps hardly less."""
    differences: dict[str, list[int]] = {}
    for number, (piece, segment) in enumerate(zip(expected, found, strict=True)):
        if not piece.calls:
            continue
        times = segment.times()
        own_names = {name for name, count in piece.counts.items() if count}
        assert times.keys() - NOT_THE_PROGRAMS == own_names, f"segment {number}, {segment.kind}"
        if not piece.has_inner and not piece.is_interrupted:
            for name in own_names:
                assert times[name] <= piece.times[name] * 1.001 + 1000, f"segment {number}, {segment.kind}: {name}"
        if segment.kind == "training":
            for name in own_names:
                differences.setdefault(name, []).append((piece.times[name] - times[name]) / piece.counts[name])
    for name, values in differences.items():
        quarter = statistics.quantiles(map(abs, [*values, values[-1]]))[0]
        assert quarter <= CLOSE_NS, f"{name}: {values}"
