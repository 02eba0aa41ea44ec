"""A day-long job in small: ten million events through 64 MB of buffers, to a receiver that stalls, dies and returns.

Training processes take turns, every operator being recorded and sent: one whose receiver misbehaves in cycles, two whose receiver
does not (their difference is the noise). Of the first it is shown that memory does not grow (the slope of its resident memory, with
the confidence interval), that every event is accounted for, and what the receiver's moods do to the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Child, answer
from harness import Budget, Row, Settings, rows, timed
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from receiver import MOODY, OK, SILENT, UNAVAILABLE, Receiver
from workloads import gpt2_step

import otel_torchprof as otp

_BUFFERS = 32 << 20
"""Bytes of the recorder, and as many of the queue: 64 MB together."""
_EVENTS, _EVENTS_QUICK = 10_000_000, 1_000_000
_STEPS = 20
"""In a row, in about a second."""
_MOODS = (OK, OK, OK, SILENT, SILENT, UNAVAILABLE, "dead", OK)
"""Of the receiver, a turn each, again and again."""
_WARM_UP = 40
_TROUBLED, _HEALTHY, _AGAIN = "receiver stalls, dies, returns", "healthy receiver", "healthy receiver, again (A/A)"
_WHAT = "ten million events in 64 MB"
_SLOPE = "KiB per 1,000 steps"
_STUDENTS_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""97.5 % quantiles of Student's t distribution by degrees of freedom."""
_FIRST, _FEWEST = 3, 3
"""Cycles of moods until memory is what it will be, and those after them that tell a slope."""


def measure(settings: Settings) -> list[Row]:
    """Step times, memory over time, and the accounts."""
    events = _EVENTS_QUICK if settings.quick else _EVENTS
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        receivers = {_TROUBLED: start(Receiver(MOODY)), _HEALTHY: start(Receiver(OK)), _AGAIN: start(Receiver(OK))}
        children = {who: start(Child(__file__, receiver.grpc)) for who, receiver in receivers.items()}
        for child in children.values():
            child.said()  # it is ready
        times = {who: list[float]() for who in children}
        memory = {who: list[float]() for who in children}
        turn = recorded = 0
        while recorded < events:
            receivers[_TROUBLED].mood(_MOODS[turn % len(_MOODS)])
            for who, child in children.items():
                found = child.ask(str(_STEPS))
                times[who] += found["times"]
                memory[who].append(found["memory"])
                if who == _TROUBLED:
                    recorded = found["recorded"]
            turn += 1
        receivers[_TROUBLED].mood(OK)
        accounts = children[_TROUBLED].ask("end")
        received = receivers[_TROUBLED].take()
    _check(accounts, received.spans, received.different)
    tails = {who: [float(np.percentile(found, 99))] for who, found in times.items()}
    budgets = {_TROUBLED: Budget(_HEALTHY, 1.1)}
    return [
        *rows(f"{_WHAT}, GPT-2 step: median", "ms", times, budgets),
        *rows(f"{_WHAT}, GPT-2 step: p99", "ms", tails, budgets),
        *(row for who, found in memory.items() for row in _slope_rows(who, found)),
        *(Row(_WHAT, what, [float(count)], "") for what, count in accounts.items()),
        Row(_WHAT, "spans at the receiver, each once", [float(received.spans)], ""),
    ]


def _check(accounts: dict[str, int], received: int, different: int) -> None:
    """Raises RuntimeError where something is lost without an account."""
    made = accounts["events recorded"] + accounts["steps"] + accounts["parts"] + accounts["jobs"]
    kept = accounts["spans sent"] + accounts["spans dropped"] + accounts["aggregated"] + accounts["collapsed"]
    produced = accounts["events until warm"] + accounts["events a step"] * (accounts["steps"] - _WARM_UP)
    if made != kept or received != accounts["spans sent"] or different != received:
        raise RuntimeError(f"the accounts do not add up: {accounts}, {received} spans ({different}) at the receiver")
    if accounts["events recorded"] + accounts["events dropped"] != produced:
        raise RuntimeError(f"{produced} events were produced, but {accounts}")


def _slope_rows(who: str, memory: list[float]) -> list[Row]:
    what = f"{_WHAT}: slope of resident memory without the queue, ends of its 95 % interval"
    if len(memory) < (_FEWEST + _FIRST) * len(_MOODS):
        return [Row(what, who, [], _SLOPE, absent="too few cycles")]
    slope, sure = _slope(memory)
    return [
        Row(what, f"{who}: {end}", [value], _SLOPE) for end, value in (("low", slope - sure), ("high", slope + sure))
    ]


def _slope(memory: list[float]) -> tuple[float, float]:
    """In ``_SLOPE``, and the half of its confidence interval.

    Of the means of whole cycles of moods, in which the queue is as full as in any other, and without the first ones, in which the
    allocator comes to have what it needs.
    """
    length = len(_MOODS)
    cycles = np.asarray(memory[: len(memory) // length * length], dtype=float).reshape(-1, length).mean(axis=1) / 1024
    values = cycles[_FIRST:]
    at = (np.arange(len(values)) - (len(values) - 1) / 2) * length * _STEPS / 1000
    slope = (at @ values) / (at @ at)
    residuals = values - values.mean() - slope * at
    deviation = np.sqrt((residuals @ residuals) / (len(values) - 2) / (at @ at))
    return float(slope), float(_STUDENTS_T[min(len(values) - 3, len(_STUDENTS_T) - 1)] * deviation)


def _main(endpoint: str) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # nor what gRPC says
    logging.getLogger("otel_torchprof").setLevel(logging.CRITICAL)  # what it says about a bad backend is expected here
    torch.set_num_threads(1)
    exporter = otp.OTLPExporter(endpoint=endpoint, protocol="grpc", timeout=1)
    processor = otp.TorchSpanProcessor(
        exporter, memory_limit=_BUFFERS, max_queue_bytes=_BUFFERS, schedule_delay_millis=500
    )
    provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", policy=otp.SpanPolicy(max_spans=2000))
    step = gpt2_step()
    warm, a_step = 0, 0
    for _ in range(_WARM_UP):
        step()
        warm, a_step = _recorded(processor), _recorded(processor) - warm
    steps = _WARM_UP
    answer("ready")
    for line in sys.stdin:
        if line.strip() == "end":
            break
        times = [timed(step) / 1e6 for _ in range(int(line))]
        steps += len(times)
        answer({"times": times, "memory": _memory(processor), "recorded": processor.health.recorded})
    otp.TorchInstrumentor().uninstrument()
    provider.shutdown()
    answer(_accounts(processor, steps, warm, a_step))


def _recorded(processor: Any) -> int:
    processor.key_averages()
    recorded: int = processor.health.recorded
    return recorded


def _accounts(processor: Any, steps: int, warm: int, a_step: int) -> dict[str, int]:
    """``warm``: events of the making of the model and of the steps of the warm-up; ``a_step``: of each one after them."""
    health = processor.health
    (stats,) = health.exporters.values()
    return {
        "events recorded": health.recorded,
        "events dropped": sum(health.dropped.values()),
        "events until warm": warm,
        "events a step": a_step,
        "steps": steps,
        "jobs": 1,
        "parts": health.spans.get("parts", 0),
        "aggregated": health.spans.get("aggregated", 0),
        "collapsed": health.spans.get("collapsed", 0),
        "spans sent": stats.exported_spans,
        "spans dropped": stats.dropped_spans + stats.failed_spans,
    }


def _memory(processor: Any) -> int:
    """Bytes that are resident, without those of the queue, which come and go, and what the allocator keeps for later."""
    with contextlib.suppress(AttributeError, OSError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    (stats,) = processor.health.exporters.values()
    return pages * os.sysconf("SC_PAGE_SIZE") - int(stats.waiting_bytes)


if __name__ == "__main__":
    _main(*sys.argv[1:])
