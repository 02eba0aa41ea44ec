"""examples/training.py: the steps of a loop that knows of nothing, as traces."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from example_modules import example_module  # noqa: E402
from instrumented import instrumented  # noqa: E402

STEPS = 4


@pytest.fixture
def example():
    """The example as a module."""
    return example_module("training")


def trained(example, detail):
    """The spans of a short training, instrumented before the model is made and taken back after the last step."""
    with instrumented(detail=detail) as service:
        example.train(STEPS)
    return service.exporter.spans


def steps_of(spans):
    """The roots of the traces that are steps, by number; the others are the job, its set-up, and a collection before that."""
    others = {"torch.job", "torch.setup", "torch.phase.gc"}
    roots = [span for span in spans if span.parent is None and span.name not in others]
    assert {root.name for root in roots} <= {"torch.step", "torch.operators"}
    roots = [root for root in roots if root.name == "torch.step"]
    return sorted(roots, key=lambda root: root.attributes["torch.step.number"])


def path(span, by_id):
    """Names from the outermost span to this one."""
    names = [span.name]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return tuple(reversed(names))


@pytest.mark.parametrize("detail", ["steps", "modules", "ops"])
def test_steps_are_linked_traces(example, detail):
    """Each iteration is a trace, linked to the one before and to the job."""
    spans = trained(example, detail)
    steps = steps_of(spans)
    (job,) = (span.context.span_id for span in spans if span.name == "torch.job")
    setup = [span.context.span_id for span in spans if span.name == "torch.setup"]
    assert [step.attributes["torch.step.number"] for step in steps] == list(range(STEPS))
    assert len({step.context.trace_id for step in steps}) == STEPS
    assert [[link.context.span_id for link in step.links] for step in steps] == [
        [*setup, job],
        *([step.context.span_id, job] for step in steps[:-1]),
    ]
    times = [(step.start_time, step.end_time) for step in steps]
    assert times == sorted(times)


@pytest.mark.parametrize("detail", ["modules", "ops"])
def test_steps_are_whole_trees(example, detail):
    """Every span's parent was sent, too, in the same trace, and lasted at least as long; no span was sent twice."""
    spans = trained(example, detail)
    by_id = {span.context.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.context.trace_id == span.context.trace_id
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time


def test_modules_have_their_full_names(example):
    """Modules are found under their step by the names that the model gives them."""
    spans = trained(example, "modules")
    by_id = {span.context.span_id: span for span in spans}
    layer = (
        "torch.step",
        "torch.phase.forward",
        "LanguageModel",
        "encoder",
        "encoder.layers.1",
        "encoder.layers.1.linear1",
    )
    assert sum(path(span, by_id) == layer for span in spans) == STEPS


def test_only_steps_by_default(example):
    """What the default shows is the job, its set-up and its steps, with their phases, and nothing else."""
    found = {span.name for span in trained(example, None)} - {"torch.setup", "torch.phase.gc"}
    assert found == {
        "torch.step",
        "torch.job",
        *(f"torch.phase.{name}" for name in ("forward", "backward", "optimizer")),
    }
