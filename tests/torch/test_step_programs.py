"""Steps and phases of whole training programs: those that each program counts and times itself."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

pytest.register_assert_rewrite("own_counts", "library_programs", "hard_programs")

import hard_programs  # noqa: E402
import library_programs  # noqa: E402
import preloaded  # noqa: E402
import step_programs  # noqa: E402
from instrumented import Instrumented  # noqa: E402
from own_counts import Own, check, segments  # noqa: E402

from otel_torchprof._process.deadline import Deadline  # noqa: E402
from otel_torchprof.integrations.automatic import shared as frameworks  # noqa: E402

PROGRAMS = [
    step_programs.plain,
    step_programs.gan,
    step_programs.wgan,
    step_programs.two_optimizers,
    step_programs.skipped_steps,
    step_programs.closures,
    step_programs.in_backward,
    step_programs.by_hand,
    step_programs.validated,
    step_programs.compiled,
    step_programs.diffusion,
    library_programs.trainer,
    library_programs.lightning,
    hard_programs.micro_batches,
    hard_programs.new_data_sets,
    hard_programs.prefetched,
    hard_programs.rollouts,
]


def named(program):
    """A test's name."""
    return program.__name__


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    """As in a process that has compiled nothing yet: roots are searched only there."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Runs a program: its own log, and the spans. Steps are learned of the libraries' loops too, as of a framework that nobody knows."""
    monkeypatch.setattr(frameworks, "install", lambda _: None)

    def run(program, *, drains=False, owns=1, **sizes):
        torch.manual_seed(0)
        service = Instrumented()
        drain = functools.partial(service.processor._drainer.take_slice, Deadline.after(60))
        logs = [Own(drain if drains else lambda: None) for _ in range(owns)]
        with service.on("steps"):
            if drains:
                drain()
            program(logs[0] if owns == 1 else logs, step_programs.Sizes(tmp_path, **sizes))
        return logs[0] if owns == 1 else logs, service.spans_at_end()

    return run


@pytest.mark.parametrize("drains", [False, True], ids=["drained-once", "drained-often"])
@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_steps_are_those_that_the_program_counts(program, drains, recorded):
    """Steps, evaluations, checkpoints and phases are those of the program's own log, drained at once or after each call."""
    own, spans = recorded(program, drains=drains)
    check(own, spans)


@pytest.mark.parametrize("iterations", [2, 3, 4, 5])
def test_what_waits_for_the_rule_is_not_all_there_is(iterations, recorded):
    """A program may end while drained events wait in turn to be handed on: what came after them is there too."""
    own, spans = recorded(step_programs.gan, drains=True, iterations=iterations)
    check(own, spans)


def test_inference_has_no_steps(recorded):
    """Where nothing is trained there is no segment of a training job, and each call of the model is a phase."""
    own, spans = recorded(step_programs.inference)
    assert not [segment for segment in segments(spans) if segment.kind != "setup"]
    calls = [call for call in own.pieces[0].calls if call.name == "inference"]
    phases = [span for span in spans if span.name == "torch.phase.inference"]
    assert len(phases) == len(calls) == own.pieces[0].counts["inference"]
    for call, phase in zip(calls, phases, strict=True):
        assert phase.end_time - phase.start_time <= call.end - call.begin


# ---- what cuts steps ----


@pytest.mark.parametrize("program", [hard_programs.exceptions, hard_programs.interrupts], ids=["error", "interrupt"])
def test_an_iteration_that_is_cut_is_no_step(program, recorded):
    """What an exception cuts in a pass, and the program does not count, is in the step of the iteration after it."""
    own, spans = recorded(program)
    check(own, spans)


def test_an_optimizer_that_fails_ends_no_step(recorded):
    """An iteration that is cut in the step of its optimizer is in the step of the iteration after it, too."""
    own, spans = recorded(hard_programs.optimizers_fail)
    check(own, spans)


# ---- loops inside of loops ----


@pytest.mark.parametrize("program", [hard_programs.nested, hard_programs.meta], ids=named)
def test_a_loop_inside_of_a_loop_is_a_part_of_its_steps(program, recorded):
    """Steps are those of the outer loop, once it is known: the first ones come when the inner one has been repeated some times."""
    own, spans = recorded(program, iterations=12)
    check(own, spans, learned_for=5)


@pytest.mark.parametrize("program", [hard_programs.new_optimizers, hard_programs.nested_anew], ids=named)
def test_a_program_that_makes_optimizers_says_where_steps_end(program, recorded):
    """Where each step has a new optimizer no two periods are equal; a program that says where its steps end has as many as iterations."""
    own, spans = recorded(program, iterations=12)
    check(own, spans)


# ---- passes inside of passes ----


@pytest.mark.parametrize(
    "program", [hard_programs.checkpointing, hard_programs.reentrant_checkpointing, hard_programs.reentrant], ids=named
)
def test_what_runs_in_a_backward_pass_is_backward(program, recorded):
    """Modules that are called in a backward pass, and backward passes in it, are in the time of that and are no phases of their own."""
    own, spans = recorded(program)
    check(own, spans)
    assert sum(span.name == "torch.phase.forward" for span in spans) == own.iterations


def test_what_is_computed_again_is_told(recorded):
    """With activation checkpointing steps say how much of their backward pass ran a part of the forward pass again."""
    own, spans = recorded(hard_programs.checkpointing)
    for step in segments(spans):
        again = step.span.attributes["torch.recomputed_duration"]
        assert 0 < again < step.span.attributes["torch.phase.backward.duration"]
        assert not any("error.type" in phase.attributes for phase in step.phases)
    assert len(segments(spans)) == own.iterations


# ---- threads ----


def test_a_loader_in_another_thread_is_overlap(recorded):
    """What another thread does for the loop's is in no phase of a step; its times stand beside them."""
    own, spans = recorded(hard_programs.prefetched)
    steps = check(own, spans)
    assert not any("data" in step.times() for step in steps)
    assert any("data" in step.overlaps() for step in steps)


def test_of_two_loops_one_has_the_steps(recorded):
    """Of training loops in two threads the steps are those of one; the other's phases are overlap."""
    owns, spans = recorded(hard_programs.threads, owns=2)
    thread = segments(spans)[0].span.attributes["thread.id"]
    (own,) = (own for own in owns if own.thread == thread)
    steps = check(own, spans)
    # They wait for one another after each iteration: what the other does in one of its own comes in this thread's step of that; or at the
    # end of the step before, where this thread wakes up late; or at the begin of the next, where it was the first to wait.
    has_other = ["backward" in step.overlaps() for step in steps]
    assert all(map(any, zip(has_other, has_other[1:], has_other[2:], strict=False)))


# ---- processes ----


def test_steps_of_two_ranks_are_those_that_each_counts(tmp_path):
    """With DistributedDataParallel each rank's steps and phases are those of its own log."""
    program = Path(__file__).with_name("rank_steps_program.py")
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = preloaded.run(program, str(tmp_path), environment=environment, has_package=True)
    assert done.returncode == 0, done.stderr
    assert sorted("".join(done.stdout.split())) == ["0", "1"]  # both write to one stream
