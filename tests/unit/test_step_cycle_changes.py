"""What is not one loop from begin to end: given rules, loops after one another and beside, limits of what is held."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from step_programs import OPTIMIZER, TRAIN, Program, at_once, boundaries, check, fed, in_pieces, one_by_one

from otel_torchprof._columns.phases import Part, Segment
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._model.step_rules import Boundary

SECOND = 1_000_000_000


def steps(found):
    """When steps began."""
    return [time for time, segment in found if segment is Segment.STEP]


def cycle_of(program, times=at_once, **given):
    """A cycle that was fed with a program."""
    cycle = StepCycle(**given)
    fed(cycle, program.tokens, times(program.tokens))
    return cycle


def test_given_optimizer_comes_before_learning():
    """Its step ends each step from the first on, though another one steps more rarely."""
    program = Program()
    for _ in range(3):
        program("[ N F B S", 2)("[ F B S1 N F B S", 1)
    check(program("|"), optimizer=OPTIMIZER)
    assert cycle_of(program, optimizer=OPTIMIZER).rule == "a step ends with the step of the given optimizer"


def test_given_optimizer_is_stepped_by_a_scaler():
    """Only the scaler's calls are seen of it."""
    program = Program()("[ N F B A U", 6)("|")
    check(program, optimizer=OPTIMIZER)
    assert "steps the given optimizer" in cycle_of(program, optimizer=OPTIMIZER).rule


def test_given_loader_comes_before_learning():
    """Each of its batches begins a step, whatever optimizers do, and evaluations stand between."""
    program = Program()
    for _ in range(3):
        program("[ N F B")("[ N F B S", 3)("N < n E n E n")
    check(program("|"), loader=TRAIN)
    assert cycle_of(program, loader=TRAIN).rule == "a step begins with a batch of the given loader"


def test_given_loader_is_the_second_of_two():
    """A batch of the other loader, just before, is of the step that ends."""
    program = Program()("( N1 [ N F B S", 1)("N1 [ N F B S", 5)("|")
    check(program, loader=TRAIN)


def test_given_loader_of_inference():
    """The program says that a batch is a step: it needs no backward pass."""
    program = Program()("[ N I", 5)("|")
    check(program, loader=TRAIN)


@pytest.mark.parametrize("given", [{"optimizer": 5}, {"loader": 5}], ids=str)
def test_what_is_given_and_never_comes_is_said(given):
    """Nothing else is learned, and health can say why there are no steps."""
    cycle = cycle_of(Program()("N F B S", 20), **given)
    assert cycle.rule.startswith("no steps: the given ")
    assert cycle.finish(10**12) == []


def test_rules_are_said_in_words():
    """Health shows what ends a step, and how that is known."""
    assert (
        cycle_of(Program()("N F B A U", 3)).rule == "a step ends with GradScaler.update (learned from 2 equal periods)"
    )
    assert cycle_of(Program()("N F B S", 1)).rule == "no steps yet: no two equal periods were seen"
    assert cycle_of(Program()("N F", 1)).rule == "no steps: no backward pass was seen"
    assert "the last or rarest of 2" in cycle_of(Program()("N F B S F1 B S1", 3)).rule


def test_two_equal_periods_make_a_rule():
    """It is in force with the second anchor, and the steps before it are told at once."""
    program = Program()("[ N F B S", 3)
    cycle = StepCycle()
    assert fed(cycle, program.tokens[:7], [program.tokens[6].end]) == []
    assert (cycle.revision, cycle.is_settled) == (0, False)
    found = cycle.feed(program.tokens[7:8], program.tokens[7].end)
    assert [one.time for one in found] == steps(program.expected)[:2]
    assert (cycle.revision, cycle.is_settled) == (1, True)


def test_an_optimizer_that_steps_rarely_is_waited_for():
    """Where there are two models, one that has not stepped yet may: for 16 periods, or 2 seconds."""
    text = "N F F1 B S"
    assert cycle_of(Program()(text, 15)).revision == 0
    assert cycle_of(Program()(text, 16)).revision == 1
    assert cycle_of(Program(scale=SECOND // 100)(text, 6)).revision == 1


@pytest.mark.parametrize("times", [at_once, one_by_one, in_pieces(1), in_pieces(2)])
def test_another_loop_is_learned_from_there_on(times):
    """After three periods that do not fit another rule is in force; until then the loader's batches begin the steps."""
    program = Program()("[ N F B S", 10)("[ N1 F1 B S1", 20)("|")
    assert steps(boundaries(program.tokens, times)) == steps(program.expected)
    cycle = cycle_of(program, times)
    assert cycle.revision == 2
    assert cycle.rule.endswith("three periods did not fit the rule before")


@pytest.mark.parametrize("times", [at_once, one_by_one, in_pieces(1)])
@pytest.mark.parametrize("batches", [3, 4, 10, 30])
def test_a_model_for_each_fold(batches, times):
    """A loop that is run anew with another model and optimizer, and a loss module, has all its steps, however short it is."""
    program = Program()
    for fold in range(5):
        program(f"[ N{100 * fold} Z{fold} F{fold} F9 B S{fold}", batches)("< n E n E n E n")
    found = boundaries(program("|").tokens, times)
    assert steps(found) == steps(program.expected)


@pytest.mark.parametrize(("step", "lost"), [("Z F F9 B S", 0), ("F F9 B S", 3)])
def test_a_model_for_each_fold_without_loader(step, lost):
    """Zeroing tells the steps apart; where nothing does, those of the next optimizer are known after three."""
    program = Program()
    for fold in range(5):
        program("[ " + " ".join(word if word in {"B", "F9"} else f"{word}{fold}" for word in step.split()), 30)
    assert len(steps(boundaries(program("|").tokens, one_by_one))) >= 5 * 30 - 4 * lost


def test_a_loop_that_takes_an_optimizer_more_is_learned():
    """A step that a second optimizer now ends is one step again."""
    program = Program()("[ N F B S", 40)("[ N F B S F1 B S1", 10)("|")
    found = boundaries(program.tokens, at_once)
    assert steps(found)[-6:] == steps(program.expected)[-6:]
    assert cycle_of(program).revision == 2


def test_an_optimizer_that_comes_once_changes_nothing():
    """What another one does once in 50 steps is part of the step that it is in."""
    program = Program()
    for _ in range(4):
        program("[ N F B S", 50)("[ N F B S1 F B S")
    check(program("|"), pieces=2)
    assert cycle_of(program).revision == 1


def test_more_accumulation_is_the_same_loop():
    """A step that takes many more batches than any before is a step."""
    program = Program()("[ N F B S", 10)
    for batches in (8, 8, 8, 64, 64, 1, 1):
        program("[")("N F B", batches)("S")
    check(program("|"), pieces=3)
    assert cycle_of(program).revision == 1


def test_a_loop_that_loses_its_optimizer_is_learned():
    """Where the optimizer is not called any more, the loader's batches begin the steps."""
    program = Program()("[ N F B S", 10)("[ N F B", 300)("|")
    found = boundaries(program.tokens, at_once)
    assert steps(found)[-20:] == steps(program.expected)[-20:]
    assert cycle_of(program).revision == 2


def test_a_loop_without_optimizer_that_gets_one_is_learned():
    """A rule without an optimizer goes when one has stepped three times."""
    program = Program()("[ N F B", 40)("N F B N F B S", 3)("[ N F B N F B S", 10)("|")
    found = boundaries(program.tokens, at_once)
    assert steps(found)[-9:] == steps(program.expected)[-9:]


@pytest.mark.parametrize("zeroing", ["", "first", "end"])
@pytest.mark.parametrize("loss", ["", "F9"])
def test_many_batches_before_the_first_step_of_an_optimizer_are_one_step(zeroing, loss):
    """However many backward passes come before it, the optimizer's step is the first that ends one."""
    program = Program()
    for _ in range(3):
        program("[")("N Z" if zeroing == "first" else "N")(f"F {loss} B")(f"N F {loss} B", 1499)
        program("S Z" if zeroing == "end" else "S")
    cycle = StepCycle()
    found = [boundary for token in program("|").tokens for boundary in cycle.feed([token], token.end)]
    found += cycle.finish(program.time)
    assert [(one.time, one.segment) for one in found] == program.expected
    assert cycle.revision == 1


def test_a_first_step_that_is_too_long_to_be_held_is_a_step():
    """Where gradients accumulate for longer than can be held, the step has begun though nobody knows yet which optimizer ends it."""
    program = Program()
    for _ in range(4):
        program("[ N Z F B")("N F B", 299)("S")
    cycle, found = StepCycle(), []
    for token in program("|").tokens:
        found += cycle.feed([token], token.end)
        if token.id % 100 == 0:
            found += cycle.settle()
    assert "none has stepped yet" not in cycle.rule
    found += cycle.finish(program.time)
    assert [(one.time, one.segment) for one in found] == program.expected


@pytest.mark.parametrize("body", ["Z F F9 B S", "Z F B A U", "Z F F1 B S Z1 F1 B S1"])
@pytest.mark.parametrize("batch", ["N", ""])
def test_a_first_step_that_somebody_wants_to_see_hides_few(body, batch):
    """A loop over one batch that was looked at before its optimizer had stepped has its steps, but for those until two periods were seen."""
    program = Program()(f"[ {batch} {body}")(f"[ {body}", 40)("|")
    looked_at = next(token.id for token in program.tokens if token.part is Part.BACKWARD)
    cycle, found = StepCycle(), []
    for token in program.tokens:
        found += cycle.feed([token], token.end)
        found += cycle.settle() if token.id == looked_at else []
    found += cycle.finish(program.time)
    assert [one.time for one in found][-38:] == [time for time, _ in program.expected[-38:]]


@pytest.mark.parametrize("end", ["S", "A U", "S S1"])
def test_the_first_step_of_an_optimizer_replaces_a_rule_without_one(end):
    """What was told of backward passes while no optimizer had stepped ends with the first step of one."""
    program = Program()("[ N F B", 40)
    cycle = StepCycle()
    found = fed(cycle, program.tokens, at_once(program.tokens)) + cycle.settle()
    assert [one.time for one in found] == steps(program.expected)
    more = Program(time=program.time)("N F B", 9)(end)(f"[ {'N F B ' * 50} {end}", 3)
    found = cycle.feed([replace(token, id=token.id + 10**9) for token in more.tokens], more.time)
    assert [one.time for one in found][-3:] == steps(more.expected)
    assert cycle.revision == 2
    assert cycle.rule.endswith("; it has stepped after all")


def test_a_pause_before_an_evaluation_belongs_to_it():
    """A step lasts as long after its optimizer's step as others do; what an evaluation has at its edges is in the evaluation."""
    program = Program()
    for _ in range(4):
        program("[ N F B S").wait(100)
    end = program.tokens[-1].end
    program.wait(9000)("n E n E n").wait(7000)("N F B S").wait(8000)("{ V")
    found = boundaries(program.tokens, at_once)
    (evaluation,) = (time for time, segment in found if segment is Segment.EVALUATION)
    (checkpoint,) = (time for time, segment in found if segment is Segment.CHECKPOINT)
    assert end + 100 < evaluation < end + 110
    assert steps(found)[-1] == program.tokens[-5].start
    assert program.tokens[-2].end + 100 < checkpoint < program.tokens[-2].end + 110


def test_a_data_set_for_every_epoch():
    """A loop without an optimizer whose loader is another one for each epoch continues after few steps."""
    program = Program()("[ N F B", 40)("[ N1 F B", 30)("|")
    found = boundaries(program.tokens, at_once)
    assert steps(found)[-20:] == steps(program.expected)[-20:]


def test_what_was_held_too_long_is_no_step():
    """Nothing that was before the limit becomes a step when the rule is known; the first that is whole is the first."""
    program = Program(scale=SECOND)("[ N F B S", 4)("|")
    cycle, found = StepCycle(), []
    for token in program.tokens:
        found += cycle.feed([token], token.end)
        if cycle.revision == 0:
            assert cycle.settle() == []
            assert cycle.is_settled
    found += cycle.finish(program.time)
    assert [one.time for one in found] == [time for time, _ in program.expected[1:]]


def test_settling_takes_the_rule_that_is_near():
    """Two equal periods are enough when no more can be held, though a second optimizer may come."""
    program = Program()("[ N F F1 B S", 3)
    cycle = StepCycle()
    assert fed(cycle, program.tokens, at_once(program.tokens)) == []
    assert [one.time for one in cycle.settle()] == steps(program.expected)
    assert (cycle.is_settled, cycle.revision) == (True, 1)


def test_a_long_wait_for_a_batch_begins_the_step():
    """A loader of training that is at a batch for longer than can be held: the wait is of the step that it delays."""
    program = Program()("[ N F B S", 3)("[ N F B S")
    cycle = StepCycle()
    waiting = program.tokens[12]
    found = fed(cycle, program.tokens[:12], at_once(program.tokens[:12]))
    found += cycle.feed([replace(waiting, end=NEVER)], waiting.start + 2)
    assert not cycle.is_settled
    found += cycle.settle()
    assert cycle.is_settled
    found += fed(cycle, program.tokens[12:], at_once(program.tokens))
    assert [one.time for one in found] == steps(program.expected)


def test_nothing_begins_before_what_is_settled():
    """A batch that was given up waiting with is of the step before; the next step begins after that."""
    program = Program()("[ N F B S", 3)("N").wait(3 * SECOND)("F B S")
    cycle = StepCycle()
    fed(cycle, program.tokens[:13], [program.tokens[12].end + SECOND])
    assert cycle.settle() == []
    (boundary,) = fed(cycle, program.tokens[13:], [program.time])
    assert boundary.time == program.tokens[12].end + SECOND


def test_the_time_after_an_anchor_is_not_settled():
    """Whether what comes after it is of the step is known with the next token; inside a step all is known."""
    program = Program()("N F B S", 5)
    cycle = cycle_of(program)
    assert cycle.is_settled
    cycle.feed([], program.time + 1)
    assert not cycle.is_settled
    following = Program(time=program.time + 10)("[ N F")
    cycle.feed(following.tokens, following.time + 10)
    assert cycle.is_settled


def test_a_loop_that_is_silent_is_over():
    """Long after its last token the step ends, where that is settled; another loop continues with the next."""
    program = Program()("[ N F B S", 4)
    cycle = cycle_of(program)
    cycle.feed([], program.time + SECOND)
    assert cycle.settle() == []
    cycle.feed([], program.time + 100 * SECOND)
    (over,) = cycle.settle()
    assert (over.segment, over.time) == (None, program.time + SECOND)
    cycle.feed([], program.time + 200 * SECOND)
    assert cycle.is_settled
    program = Program(time=program.time + 300 * SECOND, thread=1)("[ N F B S")
    program.tokens = [replace(token, id=token.id + 100) for token in program.tokens]
    found = cycle.feed(program.tokens, program.time)
    assert [one.time for one in found] == steps(program.expected)
    assert cycle.finish(program.time + 9)[-1] == Boundary(program.time, 1, program.tokens[-1].id, None)


def both(*programs):
    """Their tokens, as they come."""
    return sorted((token for program in programs for token in program.tokens), key=lambda token: token.start)


@pytest.mark.parametrize("times", [at_once, one_by_one, in_pieces(3)])
def test_a_loader_in_another_thread_does_nothing(times):
    """It has batches, and no passes."""
    program = Program()("[ N F B S", 12)("|")
    loader = Program(1, thread=2)("N", 30)
    assert boundaries(both(program, loader), times) == program.expected


@pytest.mark.parametrize("times", [at_once, one_by_one, in_pieces(3)])
def test_of_two_loops_the_first_counts(times):
    """The loop whose rule is known first has the steps, however many the other one makes."""
    program = Program(scale=2)("[ N F B S", 12)("|")
    other = Program(1, thread=2, time=1300)("N1 F1 B S1", 12)
    assert boundaries(both(program, other), times) == program.expected


@pytest.mark.parametrize("times", [at_once, one_by_one, in_pieces(3)])
def test_a_loop_on_another_thread_follows(times):
    """When the first loop has been quiet for three periods of the other, that one has the steps."""
    program = Program()("[ N F B S", 12)
    other = Program(1, thread=2, time=1300)("[ N1 F1 B S1", 40)("|")
    found = boundaries(both(program, other), times)
    last = program.time
    assert steps(found) == steps(program.expected) + [time for time in steps(other.expected) if time > last][4:]
    assert found[-1] == other.expected[-1]
    cycle = StepCycle()
    fed(cycle, both(program, other), times(both(program, other)))
    assert cycle.revision == 2


def size(thing, seen):
    """Bytes of all that it holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    parts = [thing.__dict__] if hasattr(thing, "__dict__") else []
    parts += [*thing.keys(), *thing.values()] if isinstance(thing, dict) else []
    parts += list(thing) if hasattr(thing, "__iter__") and not isinstance(thing, str | dict | type) else []
    return sys.getsizeof(thing) + sum(size(part, seen) for part in parts)


@pytest.mark.parametrize(
    "text",
    [
        "I",
        "N I",
        "N",
        "F",
        "N F",
        "E",
        "N E",
        "B",
        "F B B1",
        "S",
        "Z",
        "V",
        "A U",
        "N F B S",
        "N F B S F1 B S1 F B",
        "Z N",
    ],
)
def test_what_is_held_is_bounded(text):
    """Whatever comes, and however long, no more than one rule's worth of tokens is kept."""
    cycle = StepCycle()
    program = Program()
    for _ in range(12):
        program(text, 1000)
        fed(cycle, program.tokens, at_once(program.tokens))
        program.tokens = []
    assert size(cycle, set()) < 4_000_000


@pytest.mark.parametrize("text", ["I", "N I", "N1 I N I N2 I", "F", "N F", "E", "N E"])
def test_what_never_trains_is_settled(text):
    """A service that answers, or a job that evaluates, is held back by nothing, after the first hundred passes."""
    cycle = StepCycle()
    program = Program()(text, 100)
    fed(cycle, program.tokens, at_once(program.tokens))
    for token in Program(time=program.time, seed=1)(text, 100).tokens:
        assert cycle.feed([replace(token, id=token.id + 10**9)], token.end) == []
        assert cycle.is_settled


def test_many_threads_are_bounded():
    """Threads that come and go take no more room, and the one that trains keeps its place."""
    program = Program()("[ N F B S")
    cycle = StepCycle()
    found = fed(cycle, program.tokens, at_once(program.tokens))
    for thread in range(2, 500):
        other = Program(thread=thread, time=program.time)("N F")
        found += fed(cycle, other.tokens, at_once(other.tokens))
    more = Program(time=program.time + 1000)("[ N F B S", 3)
    found += cycle.feed([replace(token, id=token.id + 10**9) for token in more.tokens], more.time)
    assert [one.time for one in found] == steps(program.expected + more.expected)
    assert size(cycle, set()) < 1_000_000


def test_an_exhausted_loader_that_was_waited_for_long_is_not_in_the_evaluation():
    """Where a batch was given to training before it was known that there is none, an evaluation is still cut out."""
    program = Program()("[ N F B S", 3)("[ N < n E n E n")
    cycle = StepCycle()
    waiting = program.tokens[12]
    found = fed(cycle, program.tokens[:12], at_once(program.tokens[:12]))
    found += cycle.feed([replace(waiting, end=NEVER)], waiting.start + 1)
    found += cycle.settle()
    found += fed(cycle, program.tokens[12:], at_once(program.tokens))
    assert program.placed([(one.time, one.segment) for one in found]) == program.expected


def test_open_closures_are_waited_for():
    """An optimizer that is still at its closure begins its step when more cannot be held."""
    program = Program()("[ N S*", 4)
    cycle = StepCycle()
    found = fed(cycle, program.tokens[:6], at_once(program.tokens[:6]))
    batch, closure = program.tokens[6:]
    found += cycle.feed([batch, replace(closure, end=NEVER, holds_backward=False)], closure.start + 1)
    assert (cycle.is_settled, len(found)) == (False, 3)
    found += cycle.settle()
    found += cycle.feed([closure], closure.end)
    assert [one.time for one in found] == steps(program.expected)
    assert cycle.finish(closure.end + 5)[-1].time == closure.end
