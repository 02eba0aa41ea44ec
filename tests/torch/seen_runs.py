"""Runs programs with and without this package, in forks of one process, and writes what they see: for ``test_seen.py``."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import functorch.compile
import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from seen_programs import PROGRAMS, loaded_elsewhere, surroundings
from seen_values import raised_by, randomness, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from seen_programs import See


class Nowhere(SpanExporter):
    """Drops what it is sent."""

    def export(self, _spans: Any) -> Any:
        return SpanExportResult.SUCCESS


def begin(detail: str) -> Callable[[], None]:
    """Instruments torch; returns what ends that."""
    import otel_torchprof as otp

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(otp.TorchSpanProcessor(Nowhere()))
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=provider, detail=detail)

    def end() -> None:
        instrumentor.uninstrument()
        provider.shutdown()

    return end


def run(program: Callable[[See], None]) -> dict[str, Any]:
    """What a program sees, by its names for that."""
    found: dict[str, Any] = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one
    torch.manual_seed(0)

    def see(name: str, value: Any) -> None:
        found.setdefault(name, []).append(text_of(value))

    with warnings.catch_warnings(record=True) as caught:
        if program is not surroundings:
            warnings.simplefilter("always")
        error = raised_by(lambda: program(see))
        if error != "nothing":
            found["failed"] = error
        see("random", randomness())
    said = [(each.category.__name__, str(each.message), Path(each.filename).name, each.lineno) for each in caught]
    found["warnings"] = text_of(sorted(set(said)))
    return found


def run_all(name: str) -> dict[str, dict[str, Any]]:
    """What all programs see at a detail; ``without``, with a number: without us."""
    detail = name.partition("-")[0]
    torch.set_num_threads(1)
    TracerProvider(shutdown_on_exit=False).get_tracer("program")  # puts a filter of warnings in place
    end = None if detail == "without" else begin(detail)
    try:
        programs = [each for each in PROGRAMS if each is not loaded_elsewhere or name in {"without-1", "frames"}]
        return {program.__name__: run(program) for program in programs}
    finally:
        if end is not None:
            end()


def main(folder: str, details: list[str]) -> None:
    """Writes what is seen at each detail to a file, from forks of this process: torch and its compilers are imported once."""
    assert functorch.compile
    assert torch._inductor.compile_fx
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # see conftest.py
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = (
        0.5  # else torch waits five seconds for a worker that has failed to end
    )
    gc.freeze()
    running: dict[int, str] = {}
    while details or running:
        if details and len(running) < 2:
            name = details.pop(0)
            pid = os.fork()
            if pid == 0:
                Path(folder, f"{name}.json").write_text(json.dumps(run_all(name)))
                sys.stdout.flush()
                os._exit(0)
            running[pid] = name
            continue
        pid, status = os.wait()
        name = running.pop(pid)
        assert status == 0, f"{name} ended with {os.waitstatus_to_exitcode(status)}"
