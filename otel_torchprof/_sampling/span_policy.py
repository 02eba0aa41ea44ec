"""Which steps are traced in full, and how much of each: ``TorchInstrumentor().instrument(policy=SpanPolicy(...))``."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable  # noqa: TC003 - a type of a dataclass, which somebody may ask for
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from otel_torchprof import config
from otel_torchprof._spans.budget import Budget

from .cycles import ProfilerAction, plan
from .decisions import Rules
from .step_choice import StepChoice

if TYPE_CHECKING:
    from collections.abc import Mapping

KEEP = ("all", "slow")
_DETAILED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_SCHEDULE_KEYS = ("wait", "warmup", "active", "repeat", "skip_first")


@dataclass(frozen=True)
class SpanPolicy:
    """How a training job's hundred thousand events a second become traces that people and their stores can take.

    Three decisions, in this order. *Before* a step: whether it is recorded in detail (``schedule``, ``every``, ``ratio``: all
    three must want it). *After* it: whether its detail is kept (``keep``). *Then*: what of it fits into a trace
    (``max_spans``, ``max_bytes``, ``short``). A step that loses its detail by one of the first two keeps its span; whether there
    is a span at all is for the provider's sampler to say. Where there are no steps, the top-level module, label or operator is
    what a step is otherwise; only ``keep`` and the budget apply to it.

    Immutable, hence safe to share.

    Args:
        schedule: which steps, by number, as for :class:`profile`; see :func:`schedule`.
        every: every n-th step, from step 0 on.
        ratio: share of the steps, above 0, up to 1, by their trace ids, as OpenTelemetry's ``TraceIdRatioBased`` decides: a
            provider that samples by ratio and this choose among the same steps, and do not multiply.
        keep: ``"all"``, or ``"slow"``: only of steps that turn out slow, that something failed in, or that were asked for by
            ``TorchInstrumentor().keep_step()``. The others shrink to their span and its phases, with their averages on it. Steps are
            compared with steps, evaluations with evaluations, checkpoints with checkpoints; set-up is kept.
        slow_quantile: of the durations of the last 200 of a kind, above which one is slow; None: no such rule. Below 20, and as long
            as the quantile would be the longest of them, one is slow above three times their median, from the fourth on.
        slow_limit: seconds from which on a step is slow, whatever the others took; None: no such rule.
        max_spans: in a trace. Beyond it runs of short spans of one name are aggregated, then short ones collapsed into their
            parents, then the trace is split into linked ones (``docs/spans.md``).
        max_bytes: of a trace, as OTLP; beyond it the same.
        short: seconds below which spans may be aggregated and collapsed; None: a step's duration divided by ``max_spans``, which is
            what a picture of it cannot show anyway.
        job_interval: seconds after which the span of the job is ended and the next one begun; 0: no such spans.

    Raises:
        TypeError, ValueError: a bad argument; names it, its value and what is allowed.
    """

    schedule: Callable[[int], Any] | None = None
    every: int = 1
    ratio: float = 1.0
    keep: str = "all"
    slow_quantile: float | None = 0.95
    slow_limit: float | None = None
    max_spans: int = 5_000
    max_bytes: int = 4_000_000
    short: float | None = None
    job_interval: float = 600.0

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(f"schedule is {self.schedule!r}; it must be a callable such as schedule(wait=1, ...) gives")
        if self.keep not in KEEP:
            raise ValueError(f"keep is {self.keep!r}; it must be one of {', '.join(map(repr, KEEP))}")
        for name, check, allowed in _CHECKS:
            value = getattr(self, name)
            if not check(value):
                raise ValueError(f"{name} is {value!r}; it must be {allowed}")

    @classmethod
    def from_environment(cls) -> SpanPolicy:
        """As ``OTEL_TORCHPROF_POLICY`` says; what is bad in it is warned of once and ignored."""
        found: dict[str, Any] = {}
        for name, (setting, _) in _SETTINGS.items():
            value = setting._replace(parse=functools.partial(_read, name)).read()
            if value is not None:
                found[name] = value
        return cls(**found, schedule=_schedule_of_environment())

    def choice(self) -> StepChoice:
        """Which steps are recorded in detail, for the model."""
        given = self.schedule
        return StepChoice(None if given is None else lambda step: given(step) in _DETAILED, self.every, self.ratio)

    def rules(self) -> Rules:
        """What becomes of those that were, for the model."""
        return Rules(
            Budget(self.max_spans, self.max_bytes, self.short),
            keep_all=self.keep == "all",
            quantile=self.slow_quantile,
            limit_ns=None if self.slow_limit is None else round(self.slow_limit * 1e9),
        )


def checked_policy(given: SpanPolicy | None) -> SpanPolicy:
    """The policy that was given, else the environment's.

    Raises:
        TypeError: it is none.
    """
    if given is None:
        return SpanPolicy.from_environment()
    if not isinstance(given, SpanPolicy):
        options = ", ".join(f"{option.name}=" for option in fields(SpanPolicy))
        raise TypeError(f"policy is {given!r}; it must be a SpanPolicy({options}), or None")
    return given


def policy_without_code() -> SpanPolicy:
    """The environment's, where it has one; else the detail of slow steps only, which is what a backend on a laptop can take."""
    return SpanPolicy.from_environment() if os.environ.get(config.POLICY, "").strip() else SpanPolicy(keep="slow")


def policy_of_texts(texts: Mapping[str, str]) -> SpanPolicy:
    """The environment's, but for the settings that are given, as somebody typed them.

    Raises:
        ValueError: one is bad; names it, its value and what is allowed.
    """
    return replace(SpanPolicy.from_environment(), **{setting: _read(setting, text) for setting, text in texts.items()})


def _read(setting: str, text: str) -> Any:
    """A setting that is text, if it is allowed."""
    parse = _PARSERS[setting]
    try:
        value = parse(text)
    except ValueError:
        if parse is _schedule:
            raise
        value = text  # which is no number: the policy says what is allowed
    return getattr(SpanPolicy(**{setting: value}), setting)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("every", lambda v: _is_whole(v, 1), "a whole number above 0"),
    ("ratio", lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, up to 1"),
    ("slow_quantile", lambda v: v is None or (_is_number(v) and 0 < v < 1), "a number between 0 and 1, or None"),
    ("slow_limit", lambda v: v is None or (_is_number(v) and v > 0), "a number of seconds above 0, or None"),
    ("max_spans", lambda v: _is_whole(v, 10), "a whole number from 10 on"),
    ("max_bytes", lambda v: _is_whole(v, 10_000), "a whole number of bytes from 10000 on"),
    ("short", lambda v: v is None or (_is_number(v) and v >= 0), "a number of seconds from 0 on, or None"),
    ("job_interval", lambda v: _is_number(v) and v >= 0, "a number of seconds, 0 for none"),
)


def _schedule(text: str) -> Callable[[int], Any]:
    """``wait=5,warmup=1,active=3,repeat=2``."""
    found = dict.fromkeys(_SCHEDULE_KEYS, 0)
    for item in text.split(","):
        key, _, number = item.partition("=")
        if key.strip() not in _SCHEDULE_KEYS or not number.strip().isdecimal():
            raise ValueError(
                f"schedule is {text!r}; allowed is wait=N,warmup=N,active=N,repeat=N,skip_first=N, of which active is needed"
            )
        found[key.strip()] = int(number)
    if not found["active"]:
        raise ValueError(f"schedule is {text!r}; it must say how many steps are active, above 0: active=N")
    return plan(**found)


def _schedule_of_environment() -> Callable[[int], Any] | None:
    found = {setting: setting.read() for setting in config.SCHEDULE}
    given = {setting: number for setting, number in found.items() if number is not None}
    if given.get(config.ACTIVE):
        return plan(**{setting.key: number or 0 for setting, number in found.items()})
    for setting in given:
        setting.ignore("a schedule must say how many steps are active, above 0: active=N")
    return None


_SETTINGS: dict[str, tuple[config.Setting, Callable[[str], Any]]] = {
    "every": (config.EVERY, int),
    "ratio": (config.RATIO, float),
    "keep": (config.KEEP, str.lower),
    "slow_quantile": (config.SLOW_QUANTILE, float),
    "slow_limit": (config.SLOW_LIMIT, float),
    "max_spans": (config.MAX_SPANS, int),
    "max_bytes": (config.MAX_TRACE_BYTES, int),
    "short": (config.SHORT, float),
    "job_interval": (config.JOB_INTERVAL, float),
}
_PARSERS = {"schedule": _schedule, **{name: parse for name, (_, parse) in _SETTINGS.items()}}
