"""The rules by which verdicts are given: one table, with a version, that every report carries."""

from __future__ import annotations

from typing import NamedTuple


class Rules(NamedTuple):
    """Thresholds; shares are fractions of the duration of a step."""

    version: int = 6
    """Raised whenever a number or its meaning changes."""
    warm_up_steps: int = 5
    """First training steps of a recording that are left out."""
    recompiling_share: float = 0.01
    """A step that compiles for longer than this is no steady one."""
    fewest_steps: int = 20
    """Steady steps: with fewer there is no verdict."""
    firm_steps: int = 50
    """With fewer, a verdict is tentative."""
    bound_share: float = 0.20
    """A step is bound by what takes at least this, of phases of all steps together, of anything else as a median,"""
    bound_lower: float = 0.15
    """and at least this at the lower end of its 95 % interval."""
    note_share: float = 0.10
    """From here on it is a note."""
    page_seconds: float = 0.5e-6
    """That a page of fresh memory costs at least, which is how memory that is freed and taken anew is judged."""
    fewest_pages: int = 1000
    """Of a step: fewer are not mentioned."""
    fewest_waits: int = 5
    """Of a step, that are waits for Python's lock: so many,"""
    shortest_wait: float = 0.5e-3
    """not shorter than this on average,"""
    longest_wait: float = 8e-3
    """and not longer: another thread gives it up after 5 ms."""
    resamples: int = 1000
    """Of the bootstrap."""
    seed: int = 0
    """Of its random numbers."""
    most_unattributed: float = 0.15
    """Abstain: more than this is in no phase."""
    most_dropped: float = 0.01
    """Abstain: more than this fraction of the events was dropped."""
    most_runnable: float = 0.10
    """Abstain, but from waits: the loop's thread was ready to run for more than this, and did not get a processor."""
    spike_ratio: float = 3.0
    """There are spikes where the 99th percentile is above so many medians; each step above so many is one."""
    spike_cause_share: float = 0.80
    """A cause of a spike covers at least this of what the step took beyond the median,"""
    fewest_spikes: int = 3
    """in at least so many of them,"""
    spike_chance_ratio: float = 3.0
    """and in so many times as many as its usual share of a step would make it cover by chance."""
    alignment_errors: float = 3.0
    """A rank waits in a collective where the last one comes later than so many times the error of the alignment of clocks."""
    last_share: float = 0.60
    """A straggler comes last to at least this fraction of those collectives,"""
    fewest_collectives: int = 20
    """of which there are at least so many,"""
    lateness_share: float = 0.05
    """and costs at least this."""


class DiffRules(NamedTuple):
    """By which two recordings differ."""

    version: int = 3
    """Raised whenever a number or its meaning changes."""
    warm_up_steps: int = 5
    """First training steps of a recording that are left out."""
    fewest_steps: int = 20
    """Of each recording."""
    fastest: float = 0.10
    """Of the steps in which a name runs: what it takes there is compared."""
    blocks: int = 10
    """Of steps, from which the error of that is known."""
    least_share: float = 0.005
    """Of a step: what takes less is not compared, and no difference is smaller."""
    deviations: float = 4.0
    """A path, or a name, changed by at least so many standard deviations: of its own times, and of how far names are from what all changed by."""
    path_share: float = 0.80
    """Of the difference of a name: if one path has it, that is named."""
    fewest_names: int = 5
    """With fewer, that is not known,"""
    spread_of_few: float = 0.05
    """and this is taken."""
    spread: float = 0.015
    """By which a name differs in two recordings of one program at least; and as much outside of what is between no change and that of all."""
    common_change: float = 0.10
    """Everything changed alike by more than this: less may be the machine."""


RULES = Rules()
DIFF_RULES = DiffRules()
