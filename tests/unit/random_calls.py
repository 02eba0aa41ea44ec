"""Programs made by chance: calls, C functions, exceptions caught anywhere, generators and coroutines resumed in any order.

A program is drawn as plain data and written as Python; model_of_calls.py knows what calls there will be.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTION, GENERATOR, COROUTINE = range(3)
SLOTS = {GENERATOR: (0, 1), COROUTINE: (2, 3)}
"""Where generators and coroutines are kept, for whoever comes to go on with them."""

_HEADER = """\
import types
class Manager:
    def __init__(self, swallow):
        self.swallow = swallow
    def __enter__(self):
        pass
    def __exit__(self, kind, *error):
        return self.swallow and kind is not GeneratorExit
def pause():
    try:
        yield
    finally:
        len("leaf")
pause = types.coroutine(pause)
slots, started = [None] * 4, {}
"""
LINE = {name: _HEADER[: _HEADER.index(text)].count("\n") + 1 for name, text in (
    ("__init__", "def __init__"), ("__enter__", "def __enter__"), ("__exit__", "def __exit__"), ("pause", "def pause"),
    ("yield", "        yield"),
)}  # fmt: skip


class Step(NamedTuple):
    """A statement as it is drawn: what, a number that chooses (a function, a slot, ...), and statements within it."""

    what: str
    choice: int = 0
    body: tuple[Step, ...] = ()
    other: tuple[Step, ...] = ()


_SIMPLE = ("c", "c_error", "raise", "return", *["yield"] * 4, *["call"] * 4, "keyed", *["delegate"] * 3)
_SLOTTED = ("make", *["next"] * 4, *["send"] * 2, "throw", "throw", "close")


_BLOCKS = ("try", "try", "finally", "with", "loop", "loop")
_tokens = st.tuples(st.sampled_from((*_SIMPLE, *_SLOTTED, *_BLOCKS, "other", "end", "end")), st.integers(0, 11))
drawn_programs = st.lists(
    st.tuples(st.sampled_from([FUNCTION, GENERATOR, COROUTINE]), st.lists(_tokens, min_size=5, max_size=25)),
    min_size=4,
    max_size=8,
)
"""Functions: their sorts and bodies; each may call those behind it, and the first is what runs.

A body is drawn flat, which is quick and shrinks well: blocks go on to their second part with "other", and to their "end".
"""


CAUGHT_AFTER_CLOSE = [
    *[(FUNCTION, [("c", 0)])] * 3,
    (GENERATOR, [("try", 0), ("finally", 0), ("yield", 0), ("other", 0), ("c_error", 0)]),
]
"""A generator that is closed, raises another error because of it, catches that, and returns."""


RESUMES_ITSELF = [
    *[(FUNCTION, [("c", 0)])] * 2,
    (COROUTINE, [("try", 0), ("next", 3)]),
    (FUNCTION, [("c", 0)]),
]
"""A coroutine that resumes another one of the same function, which resumes itself and goes on after the error."""


def _nested(tokens: Iterator[tuple[str, int]]) -> tuple[tuple[Step, ...], str]:
    """The statements of a block, and the token that ends it."""
    found = []
    for what, choice in tokens:
        if what in ("other", "end"):
            return tuple(found), what
        body, other, ended = (), (), ""
        if what in _BLOCKS:
            body, ended = _nested(tokens)
            other = _nested(tokens)[0] if ended == "other" else ()
        found.append(Step(what, choice, body, other))
    return tuple(found), ""


def _steps(tokens: list[tuple[str, int]]) -> tuple[Step, ...]:
    """The statements of a function; an end of nothing is passed over."""
    rest, found, ended = iter(tokens), (), "end"
    while ended:
        steps, ended = _nested(rest)
        found += steps
    return found


@dataclass(eq=False)
class Action:
    """A statement as it is written: what, its line, whom it calls or which slot, and what is within it."""

    what: str
    line: int
    target: int = 0
    body: list[Action] = field(default_factory=list)
    other: list[Action] = field(default_factory=list)


@dataclass
class Written:
    """A function of the program."""

    sort: int
    line: int
    body: list[Action]


class Program:
    """A drawn program, written: its text, and what the model acts out."""

    def __init__(self, drawn: list[tuple[int, list[tuple[str, int]]]]) -> None:
        self._sorts = [FUNCTION, *(sort for sort, _ in drawn[1:])]
        self._lines = _HEADER.splitlines()
        self.functions = [self._function(number, _steps(tokens)) for number, (_, tokens) in enumerate(drawn)]
        self.text = "\n".join(self._lines) + "\n"

    def run(self, name: str) -> Any:
        """The function to call, from a text that bears this name."""
        space: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from 3.14 on, of a return in a finally
            code = compile(self.text, name, "exec")
        exec(code, space)  # noqa: S102 - the test's own text
        return space["f0"]

    def _write(self, depth: int, text: str) -> int:
        self._lines.append("    " * depth + text)
        return len(self._lines)

    def _function(self, number: int, body: tuple[Step, ...]) -> Written:
        sort = self._sorts[number]
        line = self._write(0, f"{'async ' if sort == COROUTINE else ''}def f{number}(slot=None):")
        if sort != FUNCTION:
            self._write(1, "started[slot] = True")
            # A generator that waits within a `try` runs when it is closed, in every version of Python.
            body = (Step("finally", 0, body, (Step("c"),)),)
        if sort == GENERATOR:
            self._write(1, "if False: yield")
        if number == 0:
            made = tuple(Step("make", slot) for slot in range(4))
            ended = tuple(Step(what, slot) for slot in range(4) for what in ("next", "close"))
            body = (*made, *(Step("try", 0, (step,), (Step("c"),)) for step in (*body, *ended)))
        actions = self._block(number, 1, body)
        self._write(1, "return 0")
        return Written(sort, line, actions)

    def _block(self, number: int, depth: int, steps: tuple[Step, ...], *, waits: bool = True) -> list[Action]:
        if not steps:
            self._write(depth, "pass")
        return [self._action(number, depth, step, waits=waits) for step in steps]

    def _callee(self, number: int, sort: int, choice: int) -> int | None:
        behind = [other for other in range(number + 1, len(self._sorts)) if self._sorts[other] == sort]
        return behind[choice % len(behind)] if behind else None

    def _action(self, number: int, depth: int, step: Step, *, waits: bool) -> Action:
        what, sort = step.what, self._sorts[number]
        if what in ("try", "finally", "with", "loop"):
            return self._compound(number, depth, step, waits=waits)
        if what in _SLOTTED:
            return self._slotted(number, depth, step)
        if what in ("yield", "delegate") and (sort == FUNCTION or not waits):
            what = "c"
        if what == "return" and number == 0:  # it has to see to the end of what is in the slots
            what = "c"
        requested = {"call": FUNCTION, "keyed": FUNCTION, "delegate": sort}.get(what)
        callee = 0 if requested is None else self._callee(number, requested, step.choice)
        if callee is None:
            what, callee = "c", 0
        texts = {
            "c": 'len("leaf")',
            "c_error": "[].index(0)",
            "raise": "raise ValueError",
            "return": "return 0",
            "yield": "await pause()" if sort == COROUTINE else "yield",
            "call": f"f{callee}()",
            "keyed": f"sorted((0, 0), key=f{callee})",
            "delegate": f"await f{callee}()" if sort == COROUTINE else f"yield from f{callee}()",
        }
        line = self._write(depth, texts[what])
        if what == "yield" and sort == COROUTINE:
            return Action("delegate", line, -1)
        return Action(what, line, callee)

    def _slotted(self, number: int, depth: int, step: Step) -> Action:
        slot = step.choice % 4
        sort = COROUTINE if slot in SLOTS[COROUTINE] else GENERATOR
        what = "send" if step.what == "next" and sort == COROUTINE else step.what
        callee = self._callee(number, sort, step.choice) if what == "make" else 0
        if callee is None:
            return Action("c", self._write(depth, 'len("leaf")'))
        condition = {"make": f"slots[{slot}] is None", "throw": f"{slot} in started", "close": f"{slot} in started"}
        self._write(depth, f"if {condition.get(what, f'slots[{slot}] is not None')}:")
        texts = {
            "make": f"slots[{slot}] = f{callee}({slot})",
            "next": f"next(slots[{slot}], 0)",
            "send": f"slots[{slot}].send(None)",
            "throw": f"slots[{slot}].throw(ValueError)",
            "close": f"slots[{slot}].close()",
        }
        line = self._write(depth + 1, texts[what])
        return Action(what, line, slot, [Action("callee", line, callee)])

    def _compound(self, number: int, depth: int, step: Step, *, waits: bool) -> Action:
        what, swallow = step.what, step.choice % 2
        callee = self._callee(number, GENERATOR, step.choice) if what == "loop" else swallow
        if callee is None:
            what, callee = "with", swallow
        heads = {"with": f"with Manager({swallow}):", "loop": f"for _ in f{callee}():"}
        line = self._write(depth, heads.get(what, "try:"))
        action = Action(what, line, callee, self._block(number, depth + 1, step.body, waits=waits))
        if what == "try":
            self._write(depth, "except Exception:")
            action.other = self._block(number, depth + 1, step.other, waits=waits)
        elif what == "finally":
            self._write(depth, "finally:")
            action.other = self._block(number, depth + 1, step.other, waits=False)
        return action
