"""Phases of drained batches as tokens: which are top-level, when they begin, and what is known of those that are open."""

from __future__ import annotations

import pytest
from live_batches import Event, Recorder

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import NEVER, Kind
from otel_torchprof._model.phase_tokens import PhaseTokens


def phase(name, start, end, part, parent="", *, key=7, context=0):
    """A phase; ``end`` None: it is open."""
    more = {"kind": Kind.PHASE, "fwd_thread": part, "sequence_nr": key}
    return Event(name, start, end, parent=parent, context=context, more=more)


def around(name, start, end, parent="", kind=Kind.FRAME):
    """A call or a label."""
    return Event(name, start, end, parent=parent, more={"kind": kind})


@pytest.fixture
def recorder():
    return Recorder()


def tokens(recorder, found, *events):
    """Part, begin and end of the tokens of one drain."""
    return [(token.part, token.start, token.end) for token in found.take(recorder.drain(*events))]


def test_only_top_level_phases_are_tokens(recorder):
    """A phase inside another is none, whatever is between them; one inside a call or a label is."""
    found = tokens(
        recorder,
        PhaseTokens(),
        phase("scaler", 10, 30, Part.SCALER_STEP),
        around("label", 11, 29, "scaler", Kind.LABEL),
        phase("step", 12, 20, Part.STEP, "label"),
        around("loop", 40, 90),
        phase("forward", 50, 60, Part.FORWARD, "loop"),
    )
    assert [part for part, *_ in found] == [Part.SCALER_STEP, Part.FORWARD]


def test_a_token_knows_its_object_and_its_context(recorder):
    """The address of the object and the number of the span are those of the event."""
    (token,) = PhaseTokens().take(recorder.drain(phase("data", 10, 20, Part.NEXT, key=4711, context=3)))
    assert (token.key, token.context, token.holds_backward) == (4711, 3, False)


def test_a_token_begins_with_the_call_that_it_is_in(recorder):
    """The begin is that of the outermost call or label that began after the phase before had ended; a loop around both is none."""
    found = tokens(
        recorder,
        PhaseTokens(),
        around("loop", 1, 90),
        phase("step", 10, 20, Part.STEP, "loop"),
        around("iteration", 25, 80, "loop", Kind.LABEL),
        around("call", 30, 60, "iteration"),
        phase("forward", 35, 55, Part.FORWARD, "call"),
        phase("again", 82, 88, Part.STEP, "loop"),
    )
    assert found == [(Part.STEP, 10, 20), (Part.FORWARD, 25, 55), (Part.STEP, 82, 88)]


def test_the_first_token_begins_with_what_ends_before_it_comes_again(recorder):
    """Around the first phase of a thread there may be the whole program; what is around one iteration has ended before the next."""
    found = tokens(
        recorder,
        PhaseTokens(),
        around("program", 1, 90),
        around("iteration", 8, 55, "program", Kind.LABEL),
        around("call", 10, 30, "iteration"),
        phase("forward", 15, 25, Part.FORWARD, "call"),
        phase("backward", 40, 50, Part.BACKWARD, "iteration"),
        phase("next", 60, 70, Part.FORWARD, "program"),
    )
    assert found == [(Part.FORWARD, 8, 25), (Part.BACKWARD, 40, 50), (Part.FORWARD, 60, 70)]


def test_a_token_begins_with_the_span_that_it_is_in(recorder):
    """The same of a span of the application, which is known by its context."""
    found = PhaseTokens({5: 28, 6: 3}.get)
    batch = recorder.drain(
        phase("step", 10, 20, Part.STEP, context=6),
        phase("forward", 35, 55, Part.FORWARD, context=5),
        phase("backward", 60, 70, Part.BACKWARD, context=5),
    )
    assert [token.start for token in found.take(batch)] == [10, 28, 60]


def test_a_step_with_a_closure_holds_a_backward_pass(recorder):
    """An optimizer's step inside of which the autograd engine ran, also where that came with an earlier drain."""
    found = PhaseTokens()
    first = found.take(
        recorder.drain(phase("step", 10, None, Part.STEP), phase("backward", 12, 15, Part.BACKWARD, "step"))
    )
    assert [(token.end, token.holds_backward) for token in first] == [(NEVER, True)]
    second = found.take(recorder.drain(phase("step", 10, 20, Part.STEP)))
    assert [(token.end, token.holds_backward) for token in second] == [(20, True)]
    assert first[0].id == second[0].id


def test_a_phase_in_an_open_one_is_no_token(recorder):
    """What is inside of a phase that has not ended is known to be."""
    found = tokens(
        recorder,
        PhaseTokens(),
        phase("forward", 10, None, Part.FORWARD),
        around("label", 11, None, "forward", Kind.LABEL),
        phase("wait", 12, 15, Part.COLLECTIVE, "label"),
    )
    assert found == [(Part.FORWARD, 10, NEVER)]


def test_batches_without_phases_have_no_tokens(recorder):
    """Calls, labels and parts that nobody knows give none."""
    assert tokens(recorder, PhaseTokens(), around("call", 1, 2), phase("new", 3, 4, 99)) == []


def test_a_call_of_generate_is_one_token(recorder):
    """It is what a call of its model would be, an evaluation where that is trained; the model's calls in it are none."""
    found = tokens(
        recorder,
        PhaseTokens(),
        phase("rollout", 10, 30, Part.GENERATE),
        phase("prompt", 11, 15, Part.PREFILL, "rollout"),
        phase("token", 16, 20, Part.DECODE, "rollout"),
        phase("answer", 40, None, Part.EVALUATING_GENERATE),
        phase("answer's prompt", 41, 45, Part.PREFILL, "answer"),
    )
    assert found == [(Part.INFERENCE, 10, 30), (Part.EVALUATION, 40, NEVER)]
