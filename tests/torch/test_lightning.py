"""Lightning's Trainer: actions, steps and names of modules, with the profiler and without a change of code."""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pl = pytest.importorskip("pytorch_lightning")

from framework_programs import fit, kinds, lightning, lightning_module, loader_of, own_loop, quiet, steps  # noqa: E402
from instrumented import Instrumented, instrumented  # noqa: E402
from own_counts import segments  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._cli.show import read  # noqa: E402
from otel_torchprof.integrations import LightningProfiler  # noqa: E402

BY_EPOCHS = [0, 1, 2, 3, "evaluation", "checkpoint", 4, 5, 6, 7, "evaluation", "checkpoint"]
CLOCK_NS = 300_000
"""By which two clocks may differ: either was read while the other was set."""


@pytest.mark.parametrize("profiler", [None, "simple", LightningProfiler], ids=["without-code", "simple", "profiler"])
def test_steps_are_the_trainers(tmp_path, profiler):
    """A step is one of the optimizer, with the fetch of its batches; evaluations and checkpoints stand between; nothing is doubled."""
    with instrumented(detail="steps") as service:
        fit(lightning(tmp_path, profiler() if profiler is LightningProfiler else profiler))
    spans = service.spans_at_end()
    assert kinds(spans) == BY_EPOCHS
    for step in steps(spans):
        names = [phase.name.removeprefix("torch.phase.") for phase in step.phases]
        assert names.count("data") == 2
        assert step.span.attributes["torch.step.batches"] == 2
        assert step.span.attributes["torch.step.learning_rate"] == 0.1
        assert step.span.attributes["torch.step.loss"] > 0
    assert [step.span.attributes["torch.step.epoch"] for step in steps(spans)] == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("detail", ["steps", "modules", "ops"])
def test_a_phase_in_one_of_its_name_is_counted_once(tmp_path, detail):
    """Lightning's phases and actions are around torch's phases: with any detail, averages and ``show`` have as many as there were, and no time twice."""
    with (
        instrumented(detail=detail) as service,
        otp.stream(otp.OTLPFileExporter(tmp_path / "t.jsonl"), detail=detail),
    ):
        fit(lightning(tmp_path, max_epochs=1, num_sanity_val_steps=0))
        counts = {each.key: each.count for each in service.processor.key_averages()}
    sums, _ = read(str(tmp_path / "t.jsonl"))
    displayed = {each.name: each for each in sums.averages()}
    spans = service.spans_at_end()
    # Of two batches that make a step, one zeroes the gradients and the other is in the optimizer.
    for phase, count in {"forward": 8, "backward": 8, "data": 10, "optimizer": 8}.items():
        name = f"torch.phase.{phase}"
        assert counts[name] == displayed[name].calls == count
        recorded = sum(span.name == name for span in spans)
        assert recorded > count or detail == "steps"
    for phase in ("backward", "optimizer"):
        found = displayed[f"torch.phase.{phase}"]
        assert found.self_time <= found.total <= sum(step.duration for step in sums.steps)


def test_modules_have_the_names_of_the_lightning_module(tmp_path):
    """What training_step calls has its name in the LightningModule, whose class is that of the forward pass."""
    with instrumented(detail="modules") as service:
        fit(lightning(tmp_path, LightningProfiler(), max_epochs=1))
    spans = service.spans_at_end()
    names = {span.name for span in spans}
    assert {"encoder", "encoder.0", "encoder.1", "head"} <= names
    assert not {"0", "1", "Sequential", "Linear", "ReLU"} & names
    passes = [span for span in spans if span.name == "torch.phase.forward"]
    assert {span.attributes["torch.module"] for span in passes} == {"Classifier", "encoder", "head"}


def test_actions_are_labels_and_phases(tmp_path):
    """Every action that SimpleProfiler lists is a label, as often and as long, but for the epoch and what wrote a checkpoint."""
    profiler = LightningProfiler()
    with instrumented(detail="modules") as service:
        fit(lightning(tmp_path, profiler, max_epochs=1))
    spans = service.spans_at_end()
    labels = {}
    for span in spans:
        labels.setdefault(span.name, []).append(span)
    for action, durations in profiler.recorded_durations.items():
        if action == "run_training_epoch":
            assert action not in labels
            continue
        assert len(labels[action]) == len(durations), action
        for label, seconds in zip(labels[action], durations, strict=True):
            is_whole = label.end_time - label.start_time >= seconds * 1e9 - CLOCK_NS
            assert is_whole or "ModelCheckpoint" in action, action
    action = "[Strategy]SingleDeviceStrategy.training_step"
    whole = [
        span for span in spans if span.name == "torch.phase.forward" and span.attributes["torch.module"] == "Classifier"
    ]
    assert [phase.parent.span_id for phase in whole] == [label.context.span_id for label in labels[action]]
    assert action in profiler.summary()


def test_an_evaluation_in_an_accumulation_is_a_part_of_its_step(tmp_path):
    """Between two batches of one step nothing ends it."""
    with instrumented(detail="steps") as service:
        fit(lightning(tmp_path, max_epochs=1, val_check_interval=3, num_sanity_val_steps=0))
    found = kinds(service.spans_at_end())
    assert [kind for kind in found if isinstance(kind, int)] == list(range(4))


@pytest.mark.parametrize("profiler", [None, LightningProfiler], ids=["without-code", "profiler"])
def test_evaluations_outside_of_a_training_are_segments(tmp_path, profiler):
    """``validate`` and ``test`` by themselves are one ``torch.evaluation`` each, and no step; the training between has its own."""
    with instrumented(detail="steps") as service:
        trainer = lightning(tmp_path, profiler and profiler(), max_epochs=1, num_sanity_val_steps=0)
        module, loader = lightning_module(), loader_of(8)
        module.test_step = module.validation_step
        with quiet():
            trainer.validate(module, loader, verbose=False)
            trainer.fit(module, loader_of(2), loader)
            trainer.test(module, loader, verbose=False)
    found = segments(service.spans_at_end())
    assert [each.span.attributes.get("torch.step.number", each.kind) for each in found if each.kind != "setup"] == [
        "evaluation",
        0,
        1,
        2,
        3,
        "evaluation",
        "checkpoint",
        "evaluation",
    ]
    evaluations = [each for each in found if each.kind == "evaluation"]
    assert all(each.times()["evaluation"] > 0 for each in evaluations)


def test_loops_before_and_after_a_training_have_their_steps(tmp_path):
    """What is trained without the Trainer, in the same process, is learned before it fits and afterwards."""
    with instrumented(detail="modules") as service:
        own_loop(4)
        fit(lightning(tmp_path, max_epochs=1))
        own_loop(4)
    spans = service.spans_at_end()
    assert [step.span.attributes["torch.step.number"] for step in steps(spans)] == list(range(12))
    batches = [step.span.attributes.get("torch.step.batches") for step in steps(spans)]
    assert batches == [None] * 4 + [2] * 4 + [None] * 4


def test_an_evaluation_does_not_end_what_is_learned(tmp_path):
    """``validate`` between steps of the program's own loop is a segment, and those after it are by the same rule."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with instrumented(detail="steps") as service, quiet():
        trainer = lightning(tmp_path, max_epochs=1)
        for _ in range(2):
            for _ in range(4):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            trainer.validate(lightning_module(), loader_of(8), verbose=False)
    spans = service.spans_at_end()
    assert kinds(spans) == [*range(4), "evaluation", *range(4, 8), "evaluation"]
    assert {step.span.attributes["torch.step.rule.revision"] for step in steps(spans)} == {1}


def test_uninstrumenting_takes_everything_back(tmp_path):
    """The Trainer's constructor is its own again, and no profiler keeps anything; one that is marked can be pickled."""
    constructor = pl.Trainer.__init__
    service = Instrumented()
    with service.on("steps"):
        trainer = lightning(tmp_path, "simple")
        assert {"start", "stop"} <= vars(trainer.profiler).keys()
        again = pickle.loads(pickle.dumps(trainer.profiler))  # noqa: S301 - what was just made
        again.start("action")
        again.stop("action")
        assert list(again.recorded_durations) == ["action"]
    assert pl.Trainer.__init__ is constructor
    for each in (trainer, lightning(tmp_path, "simple")):
        assert not {"start", "stop", "_torchprof_actions"} & vars(each.profiler).keys()


def test_a_profile_has_actions_and_steps(tmp_path):
    """A profile that the profiler is given runs with the Trainer; the summary has what actions took, and its averages."""
    profile = otp.profile(with_modules=True)
    profiler = LightningProfiler(profile)
    fit(lightning(tmp_path, profiler, max_epochs=1))
    assert not profile.is_running
    assert profile.step_num == 4
    names = {event.name for event in profile.events()}
    assert {"run_training_batch", "aten::addmm"} <= names
    summary = profiler.summary()
    assert "Profiler Report" in summary
    assert "Self CPU" in summary


def test_lightnings_own_profiler_takes_our_profile(tmp_path, monkeypatch):
    """PyTorchProfiler works with our class in place of torch's: it sets the number of the step, and the schedule of a short run."""
    monkeypatch.setattr(torch.profiler, "profile", otp.profile)
    profiler = pl.profilers.PyTorchProfiler(dirpath=tmp_path, filename="trace", export_to_chrome=False)
    fit(lightning(tmp_path, profiler, max_epochs=1))
    assert isinstance(profiler.function_events, otp.EventList)
    assert any("training_step" in event.name for event in profiler.function_events)


def test_a_trainer_that_is_not_as_expected_still_trains(tmp_path, caplog):
    """What fails in an action is said once, and the training continues."""
    profiler = LightningProfiler()
    profiler._torchprof_actions._before = None
    trainer = lightning(tmp_path, profiler, max_epochs=1)
    fit(trainer)
    assert trainer.global_step == 4
    assert len([record for record in caplog.records if "was not recorded" in record.message]) == 1


def test_only_profiles_are_taken():
    """What is no profile is refused when the profiler is made, by name."""
    with pytest.raises(TypeError, match="profile is True"):
        LightningProfiler(True)
