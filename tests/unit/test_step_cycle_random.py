"""Programs by chance: whatever a loop is made of, its steps are those that it counts."""

from __future__ import annotations

import random

import pytest
from step_programs import Program, check

SEEDS = range(250)


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
