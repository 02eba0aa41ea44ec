"""Where segments begin and end, and what waits until that is known."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from live_batches import Recorder
from opentelemetry.context import Context
from test_phase_tokens import phase

from otel_torchprof._columns.phases import LOOP_END, NEXT_STEP, Part, Segment, SegmentChange
from otel_torchprof._columns.schema import NEVER
from otel_torchprof._instrument.step_segments import MAX_HELD_NS, StepRule, StepSegments
from otel_torchprof._model.step_cycle import StepCycle
from otel_torchprof._model.step_spans import Trace
from otel_torchprof._model.steps import Steps
from otel_torchprof._record.step_marks import StepMark


class Loop:
    """A training loop whose phases are drained when the test says so; its clock is in ns."""

    def __init__(self, rule=StepRule(), foresight=None):  # noqa: B008 - immutable
        self.ids = itertools.count(1)
        self.steps = Steps(lambda *_: Trace(next(self.ids), True, True), lambda: next(self.ids), {}.get)
        self.began = []
        self.recorder = Recorder()
        self.usage = {}
        self.segments = StepSegments(
            self.steps, self.began.append, rule, lambda _: None, self.usage.get, foresight=foresight
        )
        self.now = 100
        self.events = []

    def __call__(self, *parts, context=0):
        for part in parts:
            self.events.append(phase(f"{part.name} {self.now}", self.now, self.now + 5, part, context=context))
            self.now += 10
        return self

    def step(self, count=1, **options):
        for _ in range(count):
            self(Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.STEP, Part.ZEROING, **options)
        return self

    def drain(self, *, settle=False, final=False):
        """Numbers of events that are released by a drain of what has come, by batch."""
        batch = self.recorder.drain(*self.events)
        self.events = []
        self.segments.add(batch, self.now, settle=settle, final=final)
        return [len(held.batch) for held in iter(self.segments.next, None)]

    def say(self, change, time, thread=1):
        self.segments.report(StepMark(time, Context(), thread, None, change), 0)

    def found(self):
        """Segment, number and begin of all that have begun."""
        return [(step.segment, step.number, step.start) for step in self.steps.known()]


@pytest.fixture
def loop():
    return Loop()


def test_a_step_has_what_the_system_said_between_its_boundaries(loop):
    """Of a step both of whose ends were asked for on one thread, what it waited, took and loaded; of each the memory at its end."""
    loop.step(4)
    names = [event.name for event in loop.events if event.name.startswith("NEXT")]
    loop.usage |= {
        loop.recorder.id_of(names[1]): (7, 100, 1, 2, 3, 4, 1_000, 2_000, 5_000, 7_000, 64, 8),
        loop.recorder.id_of(names[2]): (7, 120, 11, 2, 4, 4, 1_010, 2_025, 6_000, 7_000, 96, 12),
    }
    loop.usage[loop.recorder.id_of(names[3])] = 7, -1, 12, 2, 4, 9, 0, 0, -1, 7_000, 96, 12
    loop.step()
    loop.usage[loop.recorder.id_of(next(e.name for e in reversed(loop.events) if e.name.startswith("NEXT")))] = (
        8,
        *(9,) * 7,
        8_000,
        7_999,  # counted less exactly
        500,
        50,
    )
    loop.drain(final=True)
    used = [
        {key.removeprefix("torch.step."): value for key, value in span.attributes.items() if "rule" not in key}
        for step in loop.steps.known()
        for span in step.spans.values()
    ]
    faults = ("page_faults.minor", "page_faults.major", "context_switches.voluntary", "context_switches.involuntary")
    assert used == [
        {"memory.resident": 5_000, "memory.peak": 7_000},
        {
            "runnable_duration": pytest.approx(20e-9),
            **dict(zip(faults, (10, 0, 1, 0), strict=True)),
            "blocked_duration": pytest.approx(20e-9),  # of 50 ns, of which it ran 10 and waited 20
            "other_threads_duration": pytest.approx(15e-9),
            "memory.resident": 6_000,
            "memory.peak": 7_000,
            "tokens": 32,
            "samples": 4,
        },
        dict(zip(faults, (1, 0, 0, 5), strict=True)),
        {"memory.resident": 8_000, "memory.peak": 8_000},  # its end is on another thread
        {},
    ]


def test_events_wait_until_a_rule_is_known(loop):
    """The first steps are held until two equal periods have been seen; then all of them come, oldest first, and are steps."""
    assert loop.step().drain() == []
    assert loop.segments.events == 5
    assert loop.step(2)(Part.NEXT, Part.FORWARD).drain() == [5, 12]
    assert [(segment, number) for segment, number, _ in loop.found()] == [(Segment.STEP, n) for n in range(4)]
    assert [start for *_, start in loop.found()] == [99, 149, 199, 249]  # one before their first phases
    assert loop.began == [99]


def test_nothing_waits_where_somebody_wants_to_see_it(loop):
    """With ``settle`` what waits is released, and the rule is guessed from what there is."""
    assert loop.step().drain() == []
    assert loop.drain(settle=True) == [5, 0]


def test_what_waited_ended_with_its_drain(loop):
    """A batch that was all there was is, once it has waited, up to when it was drained."""
    loop.step().drain()
    (held,) = loop.segments._waiting
    assert held.batch.watermark == loop.now < NEVER


def test_events_wait_until_steps_are_foreseen_at_the_start():
    """Spans of the first steps would take long to make: they wait until the later ones that a policy leaves out are, or none will be."""
    foresight = mock.Mock(is_near=True)
    loop, to_the_next = Loop(foresight=foresight), (Part.BACKWARD, Part.STEP, Part.ZEROING, Part.NEXT, Part.FORWARD)
    assert loop.step(4)(Part.NEXT, Part.FORWARD).drain() == []
    assert loop(*to_the_next).drain() == []
    foresight.is_near = False
    assert loop(*to_the_next).drain() == [22, 5, 5]
    foresight.is_near = True
    assert loop(*to_the_next).drain() == []
    assert loop(*to_the_next).drain(settle=True) == [5, 5]
    loop.say(NEXT_STEP, loop.now)
    assert loop.drain() == [0]  # the program says where steps end, so none is foreseen


def test_no_event_of_a_service_waits_until_steps_are_foreseen():
    """Before a backward pass nothing says that there will be steps: requests are sent with the drain after them, as without a policy."""
    loop = Loop(foresight=mock.Mock(is_near=True))
    assert loop(Part.INFERENCE, Part.INFERENCE).drain() == [2]


def test_nothing_waits_for_ever(loop):
    """After the limit events are released, whatever they are."""
    loop(Part.NEXT, Part.FORWARD, Part.BACKWARD).drain()
    loop.now += MAX_HELD_NS + 1
    assert loop.drain() == [3, 0]


def test_steps_before_the_rule_are_counted(loop):
    """Steps that were released before a rule was known have no spans, but the first that has is numbered after them."""
    for part in (Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.STEP):
        loop(part, part)
    loop.segments._cycle.settle = list  # as where no rule can be guessed
    loop.drain(settle=True)
    del loop.segments._cycle.settle
    loop.step(4).drain(settle=True)
    steps = [number for segment, number, _ in loop.found() if segment is Segment.STEP]
    assert steps[0] == 2
    assert loop.segments.rule.endswith("; 2 steps before it was known have no span")


def test_the_program_has_precedence(loop):
    """Once it says where a step ends, nothing is learned or held; the first step began with its first phase."""
    loop.step(1).drain()
    loop.say(NEXT_STEP, 150)
    assert loop.step(3).drain() == [5, 15]
    assert loop.found() == [(Segment.STEP, 0, 100), (Segment.STEP, 1, 150)]
    assert loop.segments.rule == "the program says where steps end"


def test_a_step_ends_in_its_own_context(loop):
    """A boundary in the next iteration's span leaves the step that ends where its own phases were."""
    for context in (1, 2, 3):
        loop.step(context=context)
    loop.drain(settle=True)
    assert [list(step.spans) for step in loop.steps.known()[:2]] == [[1], [2]]


def test_evaluations_and_checkpoints_stand_between_steps(loop):
    """They are segments without a number, from their first phase to what comes next."""
    loop.step(3)(Part.NEXT, Part.EVALUATION, Part.NEXT, Part.EVALUATION)(Part.SAVE).step(2).drain(final=True)
    kinds = [(segment, number) for segment, number, _ in loop.found()]
    assert kinds == [
        *((Segment.STEP, number) for number in range(3)),
        (Segment.EVALUATION, -1),
        (Segment.CHECKPOINT, -1),
        (Segment.STEP, 3),
        (Segment.STEP, 4),
    ]


def test_the_last_step_ends_with_its_last_phase(loop):
    """The end of the recording is not that of the step."""
    loop.step(3)
    last = loop.now - 5
    loop.now += 1000
    loop.drain(final=True)
    assert loop.steps.known()[-1].end == last


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (
            "often",
            ValueError,
            "steps is 'often'; it must be 'auto', 'program', an optimizer of torch's, or a DataLoader",
        ),
        (10, TypeError, "steps is 10; it must be"),
    ],
)
def test_bad_rules_are_named(steps, error, message):
    """What is no rule is an error that says what is."""
    with pytest.raises(error, match=message):
        StepRule.checked(steps)


def test_given_rules():
    """An optimizer and a loader are told apart; ``program`` learns nothing."""

    class Optimizer:
        param_groups = ()

        def step(self):
            """Does nothing."""

    class Loader:
        dataset = ()

        def __iter__(self):
            return iter(())

    optimizer, loader = Optimizer(), Loader()
    assert StepRule.checked(optimizer) == StepRule(optimizer=optimizer)
    assert StepRule.checked(loader) == StepRule(loader=loader)
    assert StepRule.checked("program").cycle() is None
    assert StepRule.checked("auto").cycle() is not None


def test_the_rule_is_not_known_at_first(loop):
    """Before anything was drained, and while it waits, nothing is said of the loop; then why there are no steps."""
    unknown = "not known yet, since too little was taken from the recorder so far"
    assert loop.segments.rule == unknown
    loop.step().drain()
    assert loop.segments.rule == unknown
    loop.step(3).drain(settle=True)
    assert loop.segments.rule.startswith("a step ends with")
    inference = Loop()
    inference(Part.INFERENCE).drain(settle=True)
    assert inference.segments.rule == "no steps: no backward pass was seen"


def test_only_what_comes_at_once_is_all_there_is(loop):
    """A batch that is handed on by a later drain does not say that nothing came after it: a flush or a stop would end with it."""
    loop.step().drain()
    loop.step(2)
    loop.segments.add(loop.recorder.drain(*loop.events), loop.now, settle=True, final=False)
    assert [held.batch.watermark <= loop.now for held in iter(loop.segments.next, None)] == [True, True]
    loop.segments.add(loop.recorder.drain(), loop.now, settle=True, final=False)
    assert [held.batch.watermark for held in iter(loop.segments.next, None)] == [NEVER]


@pytest.mark.parametrize("moment", range(3))
def test_the_program_says_where_steps_end_in_the_middle_of_a_drain(loop, monkeypatch, moment):
    """Whenever it does, in another thread, nothing that was drained is lost."""
    asked = itertools.count()

    def is_settled(_):
        if next(asked) == moment:
            loop.say(SegmentChange(ends_step=False), 100)
        return False

    monkeypatch.setattr(StepCycle, "is_settled", property(is_settled))
    assert loop.step(3).drain(settle=True) == [15]


def test_there_is_one_set_up(loop):
    """What comes before the first step continues with a pass before the loop, where set-up has begun before."""
    loop.steps.begin(loop.now, Segment.SETUP)
    loop(Part.FORWARD).step(3).drain(settle=True)
    assert [segment for segment, _, _ in loop.found()] == [Segment.SETUP] + [Segment.STEP] * 3


BEGIN, NEXT = SegmentChange(ends_step=False, is_of_loop=True), SegmentChange(is_of_loop=True)


def kinds(loop):
    """Segments and numbers of all that have begun."""
    return [(segment, number) for segment, number, _ in loop.found()]


@pytest.mark.parametrize("drains", [False, True], ids=["at-once", "between"])
def test_a_frameworks_loop_stands_between_learned_ones(loop, drains):
    """Before it begins and after it has ended steps are learned, whenever was drained; of its own steps nothing is."""
    released = []

    def maybe_drain():
        if drains:
            released.extend(loop.drain())

    loop.step(3)
    maybe_drain()
    began = loop.now
    loop.say(BEGIN, began)
    loop.step(2)
    maybe_drain()
    loop.say(NEXT, loop.now)
    loop.step(2)
    ended = loop.now
    loop.say(LOOP_END, ended)
    maybe_drain()
    after = loop.now
    loop.step(3)
    released += loop.drain(final=True)
    assert sum(released) == 50
    assert [number for segment, number in kinds(loop)] == list(range(8))
    starts = [start for *_, start in loop.found()]
    assert starts == [99, 149, 199, began, began + 100, after - 1, after + 49, after + 99]
    assert [step.end for step in loop.steps.known()][2:5] == [began - 5, began + 100, ended]
    revisions = [
        span.attributes.get("torch.step.rule.revision") for step in loop.steps.known() for span in step.spans.values()
    ]
    assert revisions == [1, 1, 1, None, None, 2, 2, 2]


def test_a_loop_that_begins_waits_for_what_was_before_it(loop):
    """It is not begun before everything recorded earlier is known, and what was drained of it is held until then."""
    loop.step(3)
    loop.say(BEGIN, loop.now)
    assert loop.segments.begins_at == loop.now
    loop.segments.add(loop.recorder.drain(*loop.events), loop.now - 1, settle=False, final=False)
    loop.events = []
    assert loop.segments.next() is None
    assert loop.drain() == [15, 0]
    assert kinds(loop)[-1] == (Segment.STEP, 3)
    assert loop.segments.begins_at == NEVER


def test_what_a_running_loop_says_is_known_at_once(loop):
    """Once it has begun its changes need no drain, and it is told whether anything is to be recorded outside of contexts."""
    loop.say(BEGIN, loop.now)
    loop.drain()
    loop.say(NEXT, loop.now + 10)
    assert kinds(loop) == [(Segment.STEP, 0), (Segment.STEP, 1)]
    assert loop.segments.rule == "a trainer says where its steps end"


def test_a_loop_that_was_begun_before_it_is_heard_of_has_its_first_step(loop):
    """A recording that starts in the middle of a training has the step that is first heard to end, from its first phase on."""
    loop(Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.STEP)
    loop.steps.begin(50, Segment.SETUP)
    loop.say(NEXT, loop.now)
    loop.drain()
    assert loop.found() == [(Segment.SETUP, -1, 50), (Segment.STEP, 0, 100), (Segment.STEP, 1, 140)]


def test_the_programs_word_ends_a_frameworks_loop(loop):
    """What the loop that waits has said comes first, and nothing is learned any more."""
    loop.say(BEGIN, 100)
    loop.say(NEXT_STEP, 130)
    assert kinds(loop) == [(Segment.STEP, 0), (Segment.STEP, 1)]
    loop.step(3).drain(final=True)
    assert len(kinds(loop)) == 2


def test_a_loop_may_begin_before_its_first_segment(loop):
    """What it does until then is in no step, neither the last of the loop before it nor its own first, nor does it end a set-up."""
    loop.steps.begin(50, Segment.SETUP)
    loop.say(SegmentChange(None, ends_step=False, is_of_loop=True), 90)
    loop.say(LOOP_END, 95)
    loop.drain()
    assert loop.found() == [(Segment.SETUP, -1, 50)]
    loop.step(3)
    ended = loop.now - 5
    loop.say(SegmentChange(None, ends_step=False, is_of_loop=True), loop.now)
    loop(Part.EVALUATION)
    loop.say(BEGIN, loop.now)
    loop.drain()
    assert kinds(loop)[1:] == [(Segment.STEP, number) for number in range(4)]
    assert loop.steps.gaps() == [(ended, loop.now)]


ALONE = SegmentChange(Segment.EVALUATION, ends_step=False, is_of_loop=True, is_evaluation=True)


def evaluate(loop, thread=1, drains=False):
    """A framework evaluates by itself."""
    loop.say(ALONE, loop.now - 1, thread)
    if drains:
        loop.drain()
    if thread == 1:
        loop(Part.NEXT, Part.INFERENCE, Part.NEXT, Part.INFERENCE)
    loop.say(LOOP_END, loop.now - 1, thread)


@pytest.mark.parametrize("drains", [False, True], ids=["at-once", "between"])
def test_an_evaluation_by_itself_is_within_the_loop_that_is_learned(loop, drains):
    """In the middle of a step it is a part of that, between two a segment; the rule stays, and each step of the optimizer is one."""
    loop.step(3)
    loop(Part.NEXT, Part.FORWARD, Part.BACKWARD)
    evaluate(loop, drains=drains)
    loop(Part.NEXT, Part.FORWARD, Part.BACKWARD, Part.STEP, Part.ZEROING)
    evaluate(loop, drains=drains)
    loop.step(2).drain(final=True)
    numbered = [(Segment.STEP, number) for number in range(6)]
    assert kinds(loop) == [*numbered[:4], (Segment.EVALUATION, -1), *numbered[4:]]
    assert {step.revision for step in loop.steps.known() if step.segment is Segment.STEP} == {1}
    assert loop.segments.rule.startswith("a step ends with")


def test_an_evaluation_in_another_thread_leaves_the_learned_steps_alone(loop):
    """Whenever it begins and ends there, the steps of the loop's thread are what they are without it."""
    evaluate(loop, thread=2)
    for _ in range(3):
        loop.step()
        loop(Part.NEXT, Part.FORWARD)
        evaluate(loop, thread=2)
        loop(Part.BACKWARD, Part.STEP)
        loop.drain()
    loop.drain(final=True)
    assert kinds(loop) == [(Segment.EVALUATION, -1), *((Segment.STEP, number) for number in range(6))]
    assert {step.revision for step in loop.steps.known()[1:]} == {1}


def test_an_evaluation_where_nothing_is_trained_is_a_segment(loop):
    """It is there at once, from its begin to its end, and a loop that begins after it is learned."""
    began = loop.now - 1
    evaluate(loop)
    loop.drain()
    assert loop.found() == [(Segment.EVALUATION, -1, began)]
    assert loop.steps.known()[0].end == loop.now - 1
    loop.step(3).drain(final=True)
    assert kinds(loop)[1:] == [(Segment.STEP, number) for number in range(3)]
