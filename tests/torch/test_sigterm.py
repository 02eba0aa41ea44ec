"""SIGTERM while a torch operator runs that never returns, in one process and in the ranks of torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter

import pytest

LONG = 120.0
RANKS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]

PROGRAM = """
import ctypes, os, signal
signal.alarm(120)  # where it outlives its launcher
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
import otel_torchprof as otp

class Said(SpanExporter):
    def export(self, spans):
        for span in spans:
            os.write(1, f"{span.name} {span.attributes.get('torch.unfinished', False)}\\n".encode())
        return SpanExportResult.SUCCESS

def wait(x):
    library = ctypes.CDLL(None)
    mutex, condition = (ctypes.create_string_buffer(256) for _ in range(2))
    library.pthread_mutex_lock(mutex)
    library.write(1, b"ready\\n", 6)
    library.pthread_cond_wait(condition, mutex)
    return x.clone()

sigterm = torch.library.Library("sigterm", "DEF")
sigterm.define("wait(Tensor x) -> Tensor")
sigterm.impl("wait", wait, "CompositeExplicitAutograd")

provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(otp.TorchSpanProcessor(Said(), schedule_delay_millis=3_600_000))
otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", gpu_metrics=False, sigterm_timeout=20)
with otp.record_function("done"):
    pass
torch.ops.sigterm.wait(torch.ones(2))
"""


@pytest.mark.parametrize(
    ("launcher", "ranks", "status"),
    [([], 1, -signal.SIGTERM), pytest.param(TORCHRUN, RANKS, 1, marks=pytest.mark.exhaustive)],
    ids=["alone", "torchrun"],
)
def test_an_operator_that_never_returns_is_sent(tmp_path, launcher, ranks, status):
    """Each process sends what has ended, and what has not as unfinished, and dies of SIGTERM; torchrun ends as it does without."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, *launcher, str(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for _ in range(ranks):
            assert process.stdout.readline() == "ready\n"
        process.terminate()
        said, errors = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == status, errors
    found = Counter(said.splitlines())
    assert (found["done False"], found["sigterm::wait True"]) == (ranks, ranks)
