"""Programs that gevent or eventlet patches: before the package is imported, after it, and after torch is instrumented."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

pytest.importorskip("torch", minversion="2.6")

ROOT = Path(__file__).resolve().parent.parent.parent

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}
PROGRAM = """
import sys, threading, time
patch, when, path = sys.argv[1:]
if when == "before": exec(patch)
import torch, otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider
if when == "after the import": exec(patch)
counts = []

def profiles():
    with otp.profile() as found:
        torch.ones(1).neg()
    counts.append(len(found.events()) > 0)

def labels():
    for _ in range(20):
        with otp.record_function("label"):
            time.sleep(0.001)

def together(work, count):
    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()

together(profiles, 4)
provider = TracerProvider()
provider.add_span_processor(otp.TorchSpanProcessor(otp.OTLPFileExporter(path)))
instrumentor = otp.TorchInstrumentor()
instrumentor.instrument(tracer_provider=provider, detail="ops", blackbox="ops,hang=60")
if when == "after the start": exec(patch)
together(labels, 3)
labels()
assert provider.force_flush(20_000)
instrumentor.uninstrument()
provider.shutdown()
print(counts, open(path).read().count('"label"'))
"""


def skip_without(library):
    """Not by importing it: eventlet has every later fork of this process warn."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("when", ["before", "after the import", "after the start"])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_patched_program(library, when, tmp_path):
    """Greenlets that make the first profiles together wait for one another; an instrumented program loses nothing, flushes and ends."""
    skip_without(library)
    if (library, when) == ("eventlet", "after the start"):
        pytest.skip("eventlet replaces locks that others hold, and says so itself")
    words = (PATCHES[library], when, str(tmp_path / "spans.jsonl"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_TORCHPROF_BLACKBOX_DIR": str(tmp_path)}
    if when == "before":  # before torch, too
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    else:
        environment["OMP_NUM_THREADS"] = "1"
        done = preloaded.run(PROGRAM, *words, environment=environment, filters=("ignore",), has_package=True)
    assert (done.returncode, done.stdout) == (0, "[True, True, True, True] 80\n"), done.stderr
