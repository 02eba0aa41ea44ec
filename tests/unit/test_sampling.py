"""Which steps are recorded: the account of what it cost keeps to its share, whatever steps take and events cost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from otel_torchprof._instrument.sampler import NEVER, Allowance, Comparison, Rate, Sampler

LOOK = 0.25
"""Seconds between two looks of the thread that reads out."""


@dataclass
class Loop:
    """A training loop on a clock of its own, whose steps take longer while they are recorded."""

    share: float = 0.01
    step: float = 0.03
    events: int = 2000
    event_cost: float = 4e-7
    """What an event costs in this model, which a loop of nothing else does not tell."""
    alone: float = 1e-7
    read_cost: float = 0.001
    standing: float = 0.0
    """Seconds that each look costs."""
    noise: float = 0.0
    now: float = 1000.0
    added: float = 0.0
    """Seconds that recording took so far."""
    switched: list[bool] = field(default_factory=list)
    recorded: int = 0

    def __post_init__(self) -> None:
        self.begin = self.looked = self.now
        self.random = random.Random(4)
        self.sampler = Sampler(self.share, self.now, self.switch)
        self.sampler.begin(self.alone, self.now)
        self.pending = 0

    def switch(self, on: bool) -> bool:
        self.switched.append(on)
        return True

    def run(self, steps: int) -> Loop:
        for _ in range(steps):
            self.run_step()
        return self

    def run_step(self) -> None:
        is_on = self.sampler.is_on
        took = self.step * (1 + self.noise * abs(self.random.gauss(0, 1)))
        if is_on:
            took += self.events * self.event_cost
            self.added += self.events * self.event_cost
            self.pending += self.events
        self.now += took
        _, sampled = self.sampler.step_ended(self.now)
        assert sampled is is_on
        self.recorded += sampled
        if self.now >= self.sampler.ask_at:
            self.sampler.boundary(self.now)
        if self.now - self.looked >= LOOK:
            self.look()

    def look(self) -> None:
        self.looked = self.now
        self.sampler.watch(self.now)
        self.sampler.spend(self.standing, self.now)
        self.added += self.standing
        if self.sampler.needs_reading and not self.sampler.is_on:
            self.sampler.read_out(self.pending, self.read_cost, self.now, whole=True)
            self.added += self.read_cost
            self.pending = 0

    @property
    def true_share(self) -> float:
        return self.added / (self.now - self.begin)


@pytest.mark.parametrize("step", [0.001, 0.003, 0.03, 0.3, 1, 10])
@pytest.mark.parametrize("event_cost", [1e-7, 4e-7, 2e-6])
def test_the_share_is_kept(step, event_cost):
    """With steps of 1 ms to 10 s that cost a part of a per cent to tens, at most the allowed share is added, and steps are recorded."""
    events = max(20, min(int(step * 50_000), 20_000))
    loop = Loop(step=step, events=events, event_cost=event_cost)
    loop.run(int(max(500, 60 / step)))
    assert loop.true_share <= 0.0105
    assert loop.recorded >= 5
    assert loop.sampler.recorded_steps == loop.recorded


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.3])
def test_any_share_is_kept(share):
    """What is allowed is a setting, and more is recorded where more is allowed."""
    loop = Loop(share=share).run(10_000)
    assert loop.true_share <= 1.05 * share
    assert loop.recorded >= 10_000 * min(share, 0.05) / 4


def test_noise_does_not_break_it():
    """Steps that vary by a fifth hide what recording adds; the share is kept then too, and steps are recorded."""
    loop = Loop(noise=0.2).run(20_000)
    assert loop.true_share <= 0.0105
    assert loop.recorded >= 20


def test_what_events_cost_is_learnt():
    """After some segments the cost of an event is what it is in this model, from the steps themselves."""
    loop = Loop().run(5000)
    assert loop.sampler.event_cost == pytest.approx(loop.event_cost, rel=0.01)


def test_changing_costs_are_followed():
    """When events get ten times dearer, or steps a tenth as long, the share is kept again from then on."""
    loop = Loop().run(3000)
    for change in ({"event_cost": 4e-6}, {"step": 0.003, "events": 200}, {"event_cost": 1e-7}):
        vars(loop).update(change)
        loop.run(10_000)  # learns
        loop.begin, loop.added = loop.now, 0.0
        loop.run(40_000)
        assert loop.true_share <= 0.0105


def test_between_segments_nothing_is_recorded():
    """Recording is switched on and off in turn, once for each segment, and is off most of the time."""
    loop = Loop().run(3000)
    assert loop.switched[:2] == [True, False]
    assert all(first is not second for first, second in zip(loop.switched, loop.switched[1:], strict=False))
    on, off = loop.sampler.times(loop.now)
    assert on < off / 5
    assert on + off == pytest.approx(loop.now - 1000)


def test_everything_is_recorded_where_all_is_allowed():
    """A share of 1 records every step from the begin to the stop, and measures nothing."""
    loop = Loop(share=1.0).run(100)
    assert loop.recorded == 100
    assert loop.switched == [True]
    loop.sampler.stop(loop.now)
    assert loop.switched == [True, False]
    assert loop.sampler.ask_at == NEVER


def test_cheap_recording_leaves_steps_out_to_compare_with():
    """Where every step could be recorded, every other one is, so that what recording adds stays known."""
    loop = Loop(share=0.5, step=1.0, event_cost=1e-5, read_cost=1e-4).run(2000)
    assert loop.recorded == pytest.approx(1000, abs=10)
    assert loop.sampler.event_cost == pytest.approx(1e-5, rel=0.01)


def test_a_step_that_never_ends_is_broken_off():
    """A segment in a step that lasts far longer than the others is ended by the thread that looks after it."""
    loop = Loop()
    while not loop.sampler.is_on:
        loop.run_step()
    loop.now += 9.9
    loop.look()
    assert loop.sampler.is_on
    loop.now += 0.2
    loop.look()
    assert not loop.sampler.is_on
    assert not loop.sampler.needs_reading
    _, sampled = loop.sampler.step_ended(loop.now + 1)
    assert not sampled


def test_long_steps_have_more_patience():
    """Steps of 10 s are not broken off for taking a minute."""
    loop = Loop(step=10.0, events=1000)
    while not loop.sampler.is_on:
        loop.run_step()
    loop.now += 60
    loop.look()
    assert loop.sampler.is_on


def test_windows_where_there_are_no_steps():
    """Windows are opened where no steps are expected, one per time that its cost has paid for; none between steps."""
    sampler = Sampler(0.01, 0.0, lambda _on: True)
    assert not sampler.window_may_begin(1.0, expects_steps=False)  # not possible yet
    sampler.begin(1e-7, 1.0)
    assert not sampler.window_may_begin(2.0, expects_steps=True)
    assert sampler.window_may_begin(2.0, expects_steps=False)
    sampler.open_window(2.0)
    assert sampler.ask_at == NEVER
    sampler.break_off(2.05)
    assert not sampler.window_may_begin(2.1, expects_steps=False)
    sampler.read_out(10_000, 0.001, 2.1, whole=True)  # 5 ms by what is believed at first, and 1 ms
    assert not sampler.window_may_begin(2.65, expects_steps=False)
    assert sampler.window_may_begin(2.75, expects_steps=False)
    sampler.step_ended(3.0)
    assert not sampler.window_may_begin(4.0, expects_steps=True)
    assert sampler.window_may_begin(13.5, expects_steps=True)  # steps have come to an end


def test_what_is_read_in_the_middle_does_not_end_the_wait():
    """A reading that began before the segment ended does not count as the one that its end asks for."""
    sampler = Sampler(0.01, 0.0, lambda _on: True)
    sampler.begin(1e-7, 0.0)
    sampler.open_window(1.0)
    sampler.break_off(2.0)
    sampler.read_out(100, 0.0, 2.0, whole=False)
    assert sampler.needs_reading
    assert sampler.ask_at == NEVER
    sampler.read_out(100, 0.0, 3.0, whole=True)
    assert not sampler.needs_reading
    assert sampler.ask_at == pytest.approx(3.0 + 2 * 100 * 5e-7 / 0.01, abs=0.011)


def test_a_second_step_is_recorded_at_the_earliest():
    """The first boundary tells nothing of how long steps are, so recording waits for the second."""
    sampler = Sampler(0.01, 0.0, lambda _on: True)
    sampler.begin(1e-7, 0.0)
    assert sampler.step_ended(1.0) == (None, False)
    sampler.boundary(1.0)
    assert not sampler.is_on
    assert sampler.step_ended(2.0) == (1.0, False)
    sampler.boundary(2.0)
    assert sampler.is_on


@pytest.mark.parametrize("share", [0.01, 1])
def test_what_cannot_be_recorded_is_not_asked_for_again(share):
    """Where recording cannot begin it never is on, and neither boundaries nor windows ask for it any more."""
    asked = []
    sampler = Sampler(share, 0.0, asked.append)  # which returns None
    sampler.begin(1e-7, 0.0)
    for now in (1.0, 2.0, 3.0):
        assert sampler.step_ended(now)[1] is False
        sampler.boundary(now)
        sampler.resume(now)
    assert not sampler.window_may_begin(60.0, expects_steps=False)
    assert (asked, sampler.is_on, sampler.ask_at, sampler.needs_reading) == ([True], False, NEVER, False)


def test_an_allowance_is_not_saved_up():
    """After a long rest no more may be spent at once than before."""
    allowance = Allowance(0.01, 0.0)
    allowance.spend(0.001, 100.0)
    assert allowance.free_at == pytest.approx(100.1)
    assert allowance.spent == 0.001


def test_what_is_spent_all_the_time_is_allowed_for():
    """Standing costs leave less for segments, so that both together keep the share; a quarter of it remains in any case."""
    loop = Loop(standing=0.0015).run(5000)
    assert 0.006 < loop.true_share <= 0.0105
    assert loop.sampler.share(loop.now) == pytest.approx(loop.true_share, rel=0.1)
    starved = Loop(standing=0.01).run(5000)
    assert starved.recorded >= 20
    assert starved.true_share <= 0.01 / 0.25 + 0.0026


def test_standing_costs_that_end_are_forgotten():
    """What was spent all the time, and is no more, counts no longer after some tens of seconds."""
    rate = Rate(0.0)
    for second in range(100):
        rate.spend(0.01, float(second))
    assert rate.rate(100.0) == pytest.approx(0.01, rel=0.1)
    assert rate.rate(200.0) < 1e-5
    assert rate.spent == pytest.approx(1.0)


def test_a_slow_step_among_others_does_not_count():
    """One step that took a hundred times as long for another reason does not change what recording is thought to add."""
    comparison = Comparison()
    for segment in range(9):
        for duration in (1.0, 1.0, 100.0 if segment == 4 else 1.0):
            comparison.add(duration, recorded=False)
        comparison.add(300.0 if segment == 2 else 1.1, recorded=True)
    assert comparison.added == pytest.approx(0.1)


def test_no_more_than_the_time_that_was_recorded():
    """Where disturbed steps say that an event costs far too much, a segment is charged no more than the time that it took."""
    loop = Loop()
    for _ in range(9):
        for duration in (1.0, 1.0, 1.0):
            loop.sampler._comparison.add(duration, recorded=False)
        loop.sampler._comparison.add(50.0, recorded=True)
    loop.run(500)
    assert loop.recorded > 0
    recorded, _ = loop.sampler.times(loop.now)
    assert loop.sampler.share(loop.now) * (loop.now - loop.begin) <= recorded + loop.recorded * loop.read_cost + 1e-9
