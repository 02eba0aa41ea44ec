"""Hugging Face's Trainer: its steps, evaluations and checkpoints, with the callback and without a change of code."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import time

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs it")

from framework_programs import hugging_face, kinds, own_loop, steps  # noqa: E402
from instrumented import Collecting, Instrumented, instrumented  # noqa: E402
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult  # noqa: E402
from own_counts import segments  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._columns.phases import Segment  # noqa: E402
from otel_torchprof._process.deadline import Deadline  # noqa: E402
from otel_torchprof._record.step_marks import (  # noqa: E402
    NEXT_STEP,
    LoopMarks,
    SegmentChange,
)
from otel_torchprof.errors import forget_warnings  # noqa: E402
from otel_torchprof.integrations import HuggingFaceCallback  # noqa: E402
from otel_torchprof.integrations.huggingface import AutomaticCallback  # noqa: E402

BY_STEPS = [0, 1, 2, "evaluation", "checkpoint", 3, 4, 5, "evaluation", "checkpoint"]


@pytest.mark.parametrize("callbacks", [None, [HuggingFaceCallback]], ids=["without-code", "callback"])
def test_steps_are_the_trainers(tmp_path, callbacks):
    """A step is one of the optimizer, with the fetch of its batches; evaluations and checkpoints stand between; nothing is doubled."""
    with instrumented(detail="steps") as service:
        trainer = hugging_face(tmp_path, callbacks)
        trainer.train()
    spans = service.spans_at_end()
    assert kinds(spans) == BY_STEPS
    for step in steps(spans):
        names = [phase.name.removeprefix("torch.phase.") for phase in step.phases]
        assert names[:2] == ["data", "data"]
        assert names.count("forward") == names.count("backward") == 2


def test_steps_say_what_the_trainer_knows(tmp_path):
    """Loss, learning rate, epoch and the number of batches are attributes of the span of the step; those of the Trainer's own log."""
    with instrumented(detail="steps") as service:
        trainer = hugging_face(tmp_path, [HuggingFaceCallback()])
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    found = [step.span.attributes for step in steps(service.spans_at_end())]
    assert len(found) == len(logged) == 6
    for attributes, line in zip(found, logged, strict=True):
        for name in ("loss", "learning_rate", "epoch"):
            assert attributes[f"torch.step.{name}"] == pytest.approx(line[name])
        assert attributes["torch.step.batches"] == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
            [*range(6), "evaluation", "checkpoint", *range(6, 12), "evaluation", "checkpoint"],
            marks=pytest.mark.exhaustive,
        ),
        (
            {"save_strategy": "best", "metric_for_best_model": "loss", "max_steps": 3},
            [0, 1, 2, "evaluation", "checkpoint"],
        ),
        ({"eval_on_start": True, "max_steps": 2, "save_strategy": "no"}, ["evaluation", 0, 1, "evaluation"]),
        (
            {"data": lambda rows: {"a": rows[:4], "b": rows[4:8]}, "max_steps": 3},
            [0, 1, 2, "evaluation", "evaluation", "checkpoint"],
        ),
        ({"eval_strategy": "no", "save_strategy": "no", "max_steps": 2, "logging_steps": 500}, [0, 1]),
    ],
    ids=["epochs", "best", "at-start", "two-data-sets", "plain"],
)
def test_what_is_between_steps_is_no_step(tmp_path, options, expected):
    """However the Trainer is told to evaluate and save, these are segments of their own, and steps are numbered without a gap."""
    service = Instrumented()
    drain = functools.partial(service.processor._drainer.take_slice, Deadline.after(60))

    class Draining(transformers.TrainerCallback):
        """Drains whenever the Trainer says anything: what was begun is known to others then."""

        def __getattribute__(self, name):
            if name.startswith("on_"):
                drain()
            return super().__getattribute__(name)

    with service.on("steps"):
        hugging_face(tmp_path, [Draining()], **options).train()
    assert kinds(service.spans_at_end()) == expected


@pytest.mark.parametrize("callbacks", [None, [HuggingFaceCallback]], ids=["without-code", "callback"])
def test_an_evaluation_outside_of_a_training_is_a_segment(tmp_path, callbacks):
    """Before a training and after it, it is one ``torch.evaluation`` with the fetch of all its batches, and no step."""
    with instrumented(detail="steps") as service:
        trainer = hugging_face(tmp_path, callbacks, max_steps=2, eval_strategy="no", save_strategy="no")
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
    spans = service.spans_at_end()
    assert kinds(spans) == ["evaluation", 0, 1, "evaluation"]
    for segment in segments(spans):
        if segment.kind == "evaluation":
            assert [phase.name for phase in segment.phases].count("torch.phase.data") == 2


@pytest.mark.parametrize("detail", ["steps", "modules"])
@pytest.mark.parametrize("drains", [False, True], ids=["at-once", "between"])
def test_loops_before_and_after_a_training_have_their_steps(tmp_path, detail, drains):
    """What is trained without the Trainer, in the same process, is learned before it begins and when it has ended."""
    with instrumented(detail=detail) as service:
        own_loop(4)
        if drains:
            service.provider.force_flush()
        hugging_face(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no").train()
        if drains:
            service.provider.force_flush()
        own_loop(4)
    spans = service.spans_at_end()
    assert kinds(spans) == list(range(10))
    batches = [step.span.attributes.get("torch.step.batches") for step in steps(spans)]
    assert batches == [None] * 4 + [2] * 2 + [None] * 4
    assert all([phase.name for phase in step.phases].count("torch.phase.backward") for step in steps(spans))


@pytest.mark.parametrize("is_beside", [False, True], ids=["in-the-loop", "in-a-thread"])
def test_an_evaluation_does_not_cut_the_steps_of_the_programs_own_loop(tmp_path, is_beside):
    """``evaluate()`` in the middle of every accumulation, or in a thread meanwhile: a step of the optimizer is one step, by one rule."""
    with instrumented(detail="steps") as service:
        trainer = hugging_face(tmp_path)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            if is_beside:
                in_threads(trainer.evaluate)
            else:
                trainer.evaluate()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    spans = service.spans_at_end()
    assert kinds(spans) == list(range(5))
    assert {step.span.attributes["torch.step.rule.revision"] for step in steps(spans)} == {1}


class EvenSteps(Sampler):
    """Refuses every second step."""

    def should_sample(self, _context, _trace_id, _name, _kind=None, attributes=None, *_):
        number = (attributes or {}).get("torch.step.number", 0)
        return SamplingResult(Decision.DROP if number % 2 else Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "even steps"


def test_a_sampler_is_asked_for_the_steps_of_all_loops(tmp_path):
    """Where steps that a sampler refuses are not even recorded, those of a training follow on those of the loop before it."""
    with instrumented(detail="modules", sampler=EvenSteps()) as service:
        own_loop(4)
        hugging_face(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no").train()
        own_loop(4)
    spans = service.spans_at_end()
    assert [step.span.attributes["torch.step.number"] for step in steps(spans)] == [0, 2, 4, 6, 8]


def test_the_programs_own_word_has_precedence(tmp_path):
    """A program that says itself where steps end has those, and not the Trainer's too."""

    class Own(transformers.TrainerCallback):
        def on_substep_end(self, *_, **__):
            otp.TorchInstrumentor().step({"torch.step.loss": 1.5})

        def on_step_end(self, *_, **__):
            otp.TorchInstrumentor().step()

    with instrumented(detail="steps") as service:
        hugging_face(tmp_path, [Own()], max_steps=3, eval_strategy="no", save_strategy="no").train()
    found = steps(service.spans_at_end())
    assert [step.span.attributes["torch.step.number"] for step in found][:6] == list(range(6))
    assert found[0].span.attributes["torch.step.loss"] == 1.5


def test_uninstrumenting_takes_everything_back(tmp_path):
    """The Trainer's constructor is its own again, and no trainer keeps a callback; those made later get none."""
    constructor = transformers.Trainer.__init__
    service = Instrumented()
    with service.on("steps"):
        assert transformers.Trainer.__init__ is not constructor
        trainer = hugging_face(tmp_path)
        assert any(isinstance(each, AutomaticCallback) for each in trainer.callback_handler.callbacks)
    assert transformers.Trainer.__init__ is constructor
    for each in (trainer, hugging_face(tmp_path)):
        assert not any(isinstance(each, HuggingFaceCallback) for each in each.callback_handler.callbacks)


def test_a_rule_that_was_given_is_followed(tmp_path):
    """Where the program gives the rule by which steps end, trainers are left alone."""
    service = Instrumented()
    with service.on("steps", steps="program"):
        trainer = hugging_face(tmp_path)
    assert not any(isinstance(each, HuggingFaceCallback) for each in trainer.callback_handler.callbacks)


def test_streams_have_the_steps_too(tmp_path):
    """A stream that runs beside has the same steps as the instrumentation."""
    exporter = Collecting()
    with otp.stream(exporter, detail="steps"):
        hugging_face(tmp_path, [HuggingFaceCallback()], max_steps=3).train()
    assert kinds(exporter.spans) == [0, 1, 2, "evaluation", "checkpoint"]


def test_a_profile_has_the_steps(tmp_path):
    """A profile that the callback is given runs with the training, and each step of that is one of its own."""
    profile = otp.profile()
    hugging_face(tmp_path, [HuggingFaceCallback(profile=profile)], max_steps=3).train()
    assert not profile.is_running
    assert profile.step_num == 3
    assert profile.key_averages()


def test_a_profile_stops_with_a_training_that_raises(tmp_path):
    """It has the steps until then, and a later training records again."""
    profile = otp.profile()
    trainer = hugging_face(
        tmp_path, [BrokenOff(), HuggingFaceCallback(profile=profile)], save_strategy="no", eval_strategy="no"
    )
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    assert not profile.is_running
    assert profile.step_num == 2
    assert profile.key_averages()


def test_a_callback_that_is_gone_leaves_nothing_wrapped(tmp_path):
    """Methods of the Trainer are wrapped as long as there is a callback with a profile: each of two, whichever goes first."""
    gc.collect()
    methods = ("train", "evaluate")
    before = [vars(transformers.Trainer)[name] for name in methods]
    kept = HuggingFaceCallback(profile=otp.profile())
    hugging_face(tmp_path, [HuggingFaceCallback(profile=otp.profile())], max_steps=1).train()
    gc.collect()
    assert [vars(transformers.Trainer)[name].__wrapped__ for name in methods] == before
    del kept
    gc.collect()
    assert [vars(transformers.Trainer)[name] for name in methods] == before


def test_an_adapter_without_a_recording_says_so(tmp_path, caplog):
    """A callback that marks steps for nobody is a setup that was meant otherwise; one warning says what to do."""
    forget_warnings()
    for _ in range(2):
        hugging_face(tmp_path, [HuggingFaceCallback()], max_steps=1, eval_strategy="no", save_strategy="no").train()
    (said,) = [each for each in caplog.messages if "no recording with steps runs" in each]
    assert "TorchInstrumentor().instrument()" in said


def test_only_profiles_are_taken():
    """What is no profile is refused when the callback is made, by name."""
    with pytest.raises(TypeError, match=r"profile is 'trace\.json'"):
        HuggingFaceCallback(profile="trace.json")


class BrokenOff(transformers.TrainerCallback):
    """Stops a training in its third step."""

    def on_substep_end(self, _args, state, _control, **_):
        if state.global_step == 2:
            raise RuntimeError("stop")


def test_what_follows_a_training_that_was_broken_off_is_in_no_step(tmp_path):
    """An exception ends the step; later work is outside of it, and another training has its own steps."""
    with instrumented(detail="modules") as service:
        trainer = hugging_face(tmp_path, [BrokenOff()], save_strategy="no", eval_strategy="no")
        with pytest.raises(RuntimeError, match="stop"):
            trainer.train()
        later = torch.nn.Linear(2, 2)
        later(torch.ones(2))
    spans = service.spans_at_end()
    (own,) = [span for span in spans if span.name == "Linear"]
    assert all(step.span.end_time <= own.start_time for step in steps(spans))
    assert own.context.trace_id not in {step.span.context.trace_id for step in steps(spans)}


def test_what_a_training_that_begins_again_was_at_is_no_step(tmp_path):
    """``auto_find_batch_size`` tries again with a smaller batch, inside of the same call: what did not fit is no step, nor is the time until then."""

    class TooLarge(transformers.TrainerCallback):
        ended = 0

        def on_step_end(self, *_, **__):
            self.ended += 1
            if self.ended == 2:
                raise RuntimeError("CUDA out of memory.")

    begins = []

    class Begins(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            begins.append(time.time_ns())

    with instrumented(detail="steps") as service:
        plain = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"}
        hugging_face(tmp_path, [TooLarge(), Begins()], auto_find_batch_size=True, **plain).train()
    spans = service.spans_at_end()
    found = [step.span for step in steps(spans)]
    assert [span.attributes["torch.step.number"] for span in found] == list(range(len(found)))
    assert [span.start_time >= begins[1] for span in found][-3:] == [True] * 3
    assert len(found) in {4, 5}  # as the callback that fails comes before ours, or after it
    assert all(not span.start_time < begins[1] < span.end_time for span in found)


def test_trainers_are_marked_again(tmp_path):
    """Another ``instrument()`` knows the trainers that were made before it."""
    with Instrumented().on("steps"):
        trainer = hugging_face(tmp_path)
    with Instrumented().on("steps"):
        assert sum(isinstance(each, AutomaticCallback) for each in trainer.callback_handler.callbacks) == 1


def test_any_trainer_can_be_made_and_copied(tmp_path):
    """One that compares by its contents is made as ever, and one that is pickled or copied has no callback of ours."""

    class Comparing(transformers.Trainer):
        def __eq__(self, other):  # so that it has no hash
            return self is other

        __hash__ = None

    with instrumented(detail="steps"):
        trainer = hugging_face(tmp_path, subclass=Comparing)
        for copied in (
            pickle.loads(pickle.dumps(trainer.callback_handler.callbacks)),  # noqa: S301 - our own
            copy.deepcopy(trainer.callback_handler.callbacks),
        ):
            assert len(copied) == len(trainer.callback_handler.callbacks)
            assert not any(isinstance(each, HuggingFaceCallback) for each in copied)


def test_a_second_loop_beside_the_first_is_not_told_of():
    """Two trainers in two threads do not become one sequence of steps: the one that began is the loop."""
    told = []
    marks = LoopMarks()
    marks.add(type("Listener", (), {"change_segment": lambda _, change: told.append(change.begins)})())
    marks.change(SegmentChange(Segment.STEP, ends_step=False))
    in_threads(lambda: marks.change(SegmentChange(Segment.EVALUATION)))
    marks.change(SegmentChange(None))
    marks.end()
    in_threads(lambda: marks.change(SegmentChange(Segment.STEP)))
    assert told == [Segment.STEP, None, None, Segment.STEP]
    marks.change(NEXT_STEP)  # the other's thread has ended, and its loop with it
    assert told[-1] is Segment.STEP
