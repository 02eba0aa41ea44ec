"""Programs by chance: whatever a loop is made of, its steps are those that it counts."""

from __future__ import annotations

import random

import pytest
from step_programs import Program, at_once, boundaries, check, in_pieces

from otel_torchprof._columns.phases import Segment
from otel_torchprof._model.step_cycle import LatestPeriod

SEEDS = range(250)
SEEDS_WITH_VALIDATION = range(150)
OVER = {
    "eval": ["E", "E I4", "E E1", "E E1 I4"],
    "no_grad": ["I", "I I4", "I I1 I4"],
    "neither": ["F", "F F9", "F F1 F9"],
}
"""Passes over a batch of a validation, the last one of some a loss."""


def body(chance):
    """The passes of one step and its optimizers: what is done for each micro-batch, and what at the end."""
    kind = chance.choice(["one", "one", "sequence", "rounds", "scaler", "closure", "critic"])
    passes = chance.choice(["F B", "F B", "F F B", "F I B", "F F1 B", "F B B"])
    clipping = chance.choice(["", "C"])
    if kind == "closure":
        return passes, "S*", ["S*"]
    if kind == "scaler":
        return passes, f"{clipping} A U", []
    if kind == "sequence":
        return passes, f"{clipping} S S1", []
    if kind == "rounds":
        return passes, f"S {passes} {clipping} S1", []
    if kind == "critic":
        return passes, " ".join([f"S {passes}"] * chance.randint(2, 6)) + " S1", []
    return passes, f"{clipping} S", []


def pauses(chance):
    """What stands between two epochs: nothing, evaluations, checkpoints."""
    evaluation = chance.choice(["< n E n E n", "< n E n E I n", "< E E", "< n E"])
    return chance.choice(["", evaluation, "{ V V", f"{evaluation} {{ V", f"{{ V {evaluation}"])


def write(chance):
    """A program of two to five epochs."""
    p = Program(chance.random())
    passes, end, closure = body(chance)
    batches, accumulated = chance.randint(3, 7), chance.choice([1, 1, 2, 4])
    fetches, zeroing = chance.choice(["each", "all", "ahead"]), chance.choice(["", "first", "end"])
    p(chance.choice(["", "", "{ V", "( n I n I n", "I ( F"]))
    leftover = ""
    for _ in range(chance.randint(2, 5)):
        for number in range(batches):
            micro = accumulated if number < batches - 1 else chance.randint(1, accumulated)
            is_last = number == batches - 1
            first = leftover or "["
            leftover = ""
            nexts = {"each": "N", "all": "N " * micro, "ahead": ""}[fetches]
            if fetches == "ahead":
                nexts = "" if is_last else "N N" if number == 0 else "N"
            p(f"{first} {nexts} {'Z' if zeroing == 'first' else ''}")
            for at in range(micro):
                p("N" if at and fetches == "each" else "")
                p("" if closure and at == micro - 1 else passes)
            p(f"{end} {'Z' if zeroing == 'end' else ''}")
        pause = pauses(chance)
        if fetches != "ahead" and pause:
            p("N")  # the loader has no more
        elif fetches != "ahead":
            p("[ N")
            leftover = " "
        p(pause)
    if leftover:  # nothing followed the loader's last answer
        p.expected.pop()
        p.tokens.pop()
    return p("|")


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_are_those_of_the_program(seed):
    """Each step, evaluation and checkpoint begins where the program says, however its tokens come."""
    check(write(random.Random(seed)), pieces=3)


class Validated:
    """A program that validates every so many steps, with so many batches, and perhaps before the first step.

    Undecidable, and not written here: a validation with gradients of a program that trains without a loader, or without ``eval()`` of
    the data set that it trains with, since iterations that fail look the same; ``zero_grad`` after the step where there is no loader.
    """

    def __init__(self, chance):
        self.p = Program(chance.random())
        self._chance = chance
        self._has_loader = chance.random() < 0.8
        kind = chance.choice(list(OVER) if self._has_loader else ["eval", "no_grad"])
        self._over, self._validates_from_loader = chance.choice(OVER[kind]), kind != "eval" or chance.random() < 0.8
        self._end = chance.choice(["S", "S", "S S1", "A U", "C S", "S F F1 B S1"])
        self._passes = chance.choice(["F", "F F1", "F F1 F2"]) + chance.choice([" B", " F9 B"])
        self._accumulated = 1 if "F1" in self._end else chance.choice([1, 1, 2, 3, 4])
        self._zeroing = chance.choice(["", "first", "end", "top"] if self._has_loader else ["", "first"])
        self._steps, self._every = chance.choice([3, 8, 25, 60]), chance.choice([1, 2, 3, 5, 10, 50])
        self._batches = chance.choice([1, 2, 3, 10, 63, 500 if self._every > 5 else 5])
        self._epoch = chance.choice([self._steps, max(self._steps // 3, 2)])

    def write(self):
        """Its tokens."""
        if self._chance.random() < 0.3:  # in eval() before training no module is known to be trained
            self.p("(")(f"n {self._over.replace('E', 'I')}", self._chance.choice([1, 5, 100]))("n")
        for step in range(self._steps):
            self._train(step)
            if (step + 1) % self._every == 0:
                self._validate(is_after_epoch=(step + 1) % self._epoch == 0 and step + 1 < self._steps)
        return self.p

    def _train(self, step):
        is_last_of_epoch = (step + 1) % self._epoch == 0
        begins_epoch = self._has_loader and step and step % self._epoch == 0 and step % self._every
        zeroes = "Z" if self._zeroing == "top" else ""
        self.p(f"[ N {zeroes}" if begins_epoch else f"{zeroes} [")  # the loader had no more, and nothing was between
        for micro in range(self._chance.randint(1, self._accumulated) if is_last_of_epoch else self._accumulated):
            self.p("N" if self._has_loader else "")
            self.p("Z" if micro == 0 and self._zeroing == "first" else "")(self._passes)
        self.p(self._end)("Z" if self._zeroing == "end" else "")

    def _validate(self, *, is_after_epoch):
        self.p("N" if self._has_loader and is_after_epoch else "")("<")
        if self._validates_from_loader:
            self.p(f"n {self._over}", self._batches)("n")
        else:
            self.p(self._over, self._batches)


def of_training(found):
    """Begins of steps and evaluations."""
    return [(time, segment) for time, segment in found if segment in {Segment.STEP, Segment.EVALUATION}]


@pytest.mark.parametrize("seed", SEEDS_WITH_VALIDATION)
def test_validations_hide_no_steps(seed):
    """Whatever a loop validates with, how often and how long, its steps and evaluations begin where the program says."""
    program = Validated(random.Random(seed)).write()
    for times in (at_once, in_pieces(seed)):
        found = program.placed(boundaries(program.tokens, times))
        assert of_training(found) == of_training(program.expected)


TOKENS = ("N", "F", "B", "S", "Z", "I", "n", "E", "F1", "S1", "A", "U", "V", "S*")


@pytest.mark.parametrize("seed", range(60))
def test_periods_that_are_like_the_one_before_need_no_walk(seed, monkeypatch):
    """The boundaries are the same if every token is walked, whatever comes between the periods."""
    chance = random.Random(seed)
    program, period = (
        Program(seed),
        chance.choice(["N Z F B S", "F B S Z", "N F B N F B S", "S*", "N F E B S", "S1 N F B S"]),
    )
    for _ in range(12):
        program(period, chance.choice([1, 4, 20]))(" ".join(chance.choices(TOKENS, k=chance.randint(0, 3))))
    times = (at_once, in_pieces(seed))
    found = [boundaries(program.tokens, one) for one in times]
    monkeypatch.setattr(LatestPeriod, "repeats", lambda *_: ())
    assert [boundaries(program.tokens, one) for one in times] == found
