"""Steps of the programs that people write: their boundaries are those of the program's own counter, however the tokens come."""

from __future__ import annotations

import pytest
from step_programs import Program, check

from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._model.step_walk import Walk

TEXTS = {
    "Hugging Face Trainer": ["[ N N N N F B F B F B F B C S"] * 5
    + ["[ N N N F B F B F B C S", "< n E n E n E n"]
    + (["[ N N N N F B F B F B F B C S"] * 5 + ["[ N N N F B F B F B C S", "< n E n E n E n { V V V"]) * 2
    + ["|"],
    "Lightning": ["( n I n I n", *(["[ N S*"] * 6 + ["N < n E n E n { V"]) * 2, "|"],
    "GAN": ["[ N Z F F1 B S Z1 F1 B S1"] * 9 + ["|"],
    "WGAN": ["[", *["N F F1 Z B S"] * 5, "F F1 Z1 B S1"] * 6 + ["|"],
    "the scaler skips its optimizer's first steps": ["[ N Z F B A U"] * 12 + ["|"],
    "LBFGS, whose closure is inside the step": ["[ N S*"] * 8 + ["|"],
    "LBFGS without a loader": ["[ S*"] * 8 + ["|"],
    "optimizers of parameters in the backward pass": ["[ N F B"] * 50 + ["|"],
    "two optimizers of one model": ["[ N Z Z1 F B S S1"] * 8 + ["|"],
    "parameters updated by the program": (["[ N F B"] * 30 + ["N < n E n E n"]) * 2 + ["|"],
    "parameters updated by the program, without a loader": ["[ F B"] * 50 + ["|"],
    "compiled, or on several ranks": ["[ N Z F B C S"] * 9 + ["|"],
    "diffusion, with pictures": (["[ N F B S Z"] * 5 + ["I"] * 20) * 4 + ["[ N F B S Z"] * 5 + ["|"] + ["I"] * 20,
    "Accelerate asks one batch ahead": ["[ N N F B S", "[ N F B S", "[ N F B S", "[ N F B S", "[ F B S |"],
    "Accelerate, zeroing at the end": ["[ N N F B S Z", "[ N F B S Z", "[ N F B S Z", "[ F B S Z |"],
    "Accelerate, zeroing first": ["[ N N Z F B S", "[ N Z F B S", "[ N Z F B S", "[ Z F B S |"],
    "zeroing at the end": ["[ N F B S Z"] * 8 + ["|"],
    "zeroing between the passes": ["[ N F Z B S"] * 8 + ["|"],
    "zeroing at the end of two optimizers": ["[ N F B S F1 B S1 Z Z1"] * 8 + ["|"],
    "zeroing first, without a loader": ["[ Z F B S"] * 8 + ["|"],
    "a partial accumulation at the end of an epoch": (["[ N F B N F B N F B S"] * 4 + ["[ N F B S"]) * 3 + ["|"],
    "accumulation with GradScaler": (["[ N F B N F B A U"] * 4 + ["[ N F B A U"]) * 3 + ["|"],
    "evaluation before training": ["( Z < n E n E n", "[ N F B S", "[ N F B S", "[ N F B S |"],
    "evaluation without gradients first": ["( n I n I n I n", "[ N F B S", "[ N F B S", "[ N F B S |"],
    "evaluation of the training data first": ["( N I N I N", "[ N Z F B S", "[ N Z F B S", "[ N Z F B S |"],
    "two batches of the training data tried first": ["( N I N I N [ F B S", "[ N F B S", "[ N F B S", "[ N F B S |"],
    "evaluation of the training data first, with closures": ["( N I N I N", "[ N S*", "[ N S*", "[ N S* |"],
    "evaluation with another loader's last batch": ["[ N F B S", "[ N F B S", "[ N F B S N", "< n E n E n"] * 3 + ["|"],
    "evaluation without a loader": ["[ N F B S", "[ N F B S", "[ N F B S", "< E E E"] * 3 + ["|"],
    "evaluation in a body, before training": ["[ N F B S", "[ N F B S N", "< n E n E n", "[ F B S"] * 3 + ["|"],
    "evaluation inside an accumulation": ["[ N F B N F B S", "[ N F B n E n E n N F B S"] * 4 + ["|"],
    "checkpoint inside an accumulation": ["[ N F B V N F B S"] * 4 + ["|"],
    "checkpoints in a row, and evaluation": ["[ N F B S", "[ N F B S", "{ V V V", "< n E n"] * 3 + ["|"],
    "evaluation, checkpoint": ["[ N F B S", "[ N F B S", "< n E n", "{ V V V"] * 3 + ["|"],
    "evaluation of the training data": ["[ N F B S"] * 4 + ["N < E N E N"] + ["[ N F B S"] * 4 + ["|"],
    "a teacher": ["[ N I F B S"] * 40 + ["|"],
    "labels by the model itself": ["[ N I F B S"]
    + ["[ N E Z F B S"] * 9
    + ["< n E n E n"]
    + ["[ N E F B S"] * 5
    + ["|"],
    "labels by the model itself, two checkpoints": (["[ N I F B S"] + ["[ N E F B S"] * 4 + ["N { V V"]) * 2 + ["|"],
    "evaluation without a loader after the last batch": ["[ N F B S"] * 4
    + ["N < E E"]
    + ["[ N F B S"] * 4
    + ["N < E E |"],
    "a reward model and rollouts": ["I I I I I [ N F B S", "[ N F B S", "[ N F B S"] * 9 + ["|"],
    "two loaders": ["[ N N1 F F B S"] * 8 + ["|"],
    "pipeline": ["[ N N N N F F F F B B B B S"] * 5 + ["|"],
    "an exception before the backward pass": ["[ N F B S"] * 4 + ["[ N F N F B S"] + ["[ N F B S"] * 4 + ["|"],
    "an exception before the optimizer": ["[ N F B S"] * 4 + ["[ N F B N F B S"] + ["[ N F B S"] * 4 + ["|"],
    "an exception in the first step": ["[ N F B N F B S"] + ["[ N F B S"] * 4 + ["|"],
    "interrupted, and another loader": ["[ N F B S"] * 4 + ["[ N F N2 F B S"] + ["[ N2 F B S"] * 4 + ["|"],
    "interrupted in a step": ["[ N F B S"] * 4 + ["[ N F B |"],
    "a model tried before the loop": ["( F [ N F B S", "[ N F B S", "[ N F B S", "|"],
    "a batch tried before the loop": ["( N F [ N F B S", "[ N F B S", "[ N F B S |"],
    "one step": ["[ N F B S |"],
    "two steps": ["[ N F B S", "[ N F B S |"],
    "one step of each of two": ["[ N F B S F1 B S1 |"],
    "one and a half of two": ["[ N F B S F1 B S1 [ N F B S |"],
    "three steps without an optimizer": ["[ N F B", "[ N F B", "[ N F B | N"],
    "two scalers": ["[ N F B A U F1 B A1 U1"] * 6 + ["|"],
    "two optimizers and one scaler": ["[ N F B A F1 B A1 U"] * 6 + ["|"],
    "one of two optimizers has a scaler": ["[ N F B S1 F B A U"] * 6 + ["|"],
    "more critic steps first": ["[", *["N F F1 Z B S"] * 9, "F F1 Z1 B S1", *["[ N F F1 Z B S F F1 Z1 B S1"] * 4, "|"],
    "a single step of an optimizer before": ["( S [ N F B S1"] + ["[ N F B S1"] * 30 + ["|"],
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_boundaries_are_those_of_the_program(text):
    """Each step begins where the program counts it, and so do evaluations and checkpoints."""
    program = Program()
    for part in text:
        program(part)
    program.expected = [one for one in program.expected if one[1] is not None or one is program.expected[-1]]
    check(program)


def test_inference_alone_has_no_steps():
    """A million calls without gradients give no boundary, and hold nothing."""
    program = Program()("I", 1000)
    cycle = StepCycle()
    for token in program.tokens:
        assert cycle.feed([token], token.end) == []
        assert cycle.is_settled
    assert cycle.finish(program.time) == []
    assert cycle.rule == "no steps: no backward pass was seen"


@pytest.mark.parametrize("period", ["N Z F B S", "F B S", "S*", "N F B N F B S"])
def test_a_loop_that_repeats_itself_is_not_walked(period, monkeypatch):
    """Once a period leaves the walk as it was, only a period that differs is walked."""
    walked, walk = [], Walk.walk
    monkeypatch.setattr(Walk, "walk", lambda self, token: (walked.append(token), walk(self, token)))
    program = Program()(f"[ {period}", 1000)
    assert len(StepCycle().feed(program.tokens, program.time)) == 1000
    assert len(walked) < 50
