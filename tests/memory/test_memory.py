"""Memory of the process after many profiles, many threads, many instrumentations: it does not grow.

What is counted is in use: what `malloc` has given out (Python's objects too, with PYTHONMALLOC=malloc) and what is mapped beside
its arena. Resident memory also grows while a chunk, taken long ago, fills for the first time, 57 bytes per instrumentation.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", minversion="2.6")

from slopes import lower_bound, without_jumps

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import ctypes, gc, os, sys, threading
import torch, otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider
torch.set_num_threads(1)
x, page = torch.ones(3), os.sysconf("SC_PAGE_SIZE")

class Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *map("other{}".format, range(6)), "in_use", "free", "keep_cost")]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Malloc

def in_use():
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * page
    malloc = mallinfo()
    return mapped - malloc.arena + malloc.in_use

def cycle():
    with otp.profile(record_shapes=True) as prof:
        for _ in range(20):
            with otp.record_function("label"):
                x.neg()
    prof.key_averages()
    list(prof.to_otlp())

def work():
    with otp.record_function("in a thread"):
        x.neg()

def thread():
    started = threading.Thread(target=work)
    started.start()
    started.join()

def provider(*processors):
    made = TracerProvider(shutdown_on_exit=False)
    for processor in processors:
        made.add_span_processor(processor)
    return made

# One with a processor that stays, one for which a processor is made each time.
providers = provider(otp.TorchSpanProcessor()), provider()
layer = torch.nn.Linear(3, 3)

def instrumented():
    for tracer_provider in providers:
        otp.TorchInstrumentor().instrument(tracer_provider=tracer_provider, detail="ops", skip_dep_check=True)
        with otp.record_function("label"):
            layer(x).sum().backward()
        otp.TorchInstrumentor().uninstrument()

body, count = {"cycles": cycle, "threads": thread, "instrumented": instrumented}[sys.argv[1]], int(sys.argv[2])
everywhere = otp.profile(all_threads=True, memory_limit=1 << 20) if sys.argv[1] == "threads" else None
if everywhere: everywhere.start()
gc.collect()
gc.freeze()  # collections are quick from here on: they look at what the cycles make, not at all of torch
for number in range(count):
    body()
    if number % (count // 100) == count // 100 - 1:
        gc.collect()
        print(in_use())
if everywhere: everywhere.stop()
"""

MOST_BYTES = 100
"""Growth per cycle that is let pass: less than anything that is allocated per profile or per thread (a session is 400 bytes, a
thread's buffer 60 KB), and above what caches that fill ever more slowly make of the second half (34 bytes, of threads and of instrumentations 8)."""
CYCLES = {"cycles": 1000, "threads": 3000, "instrumented": 600}
"""Threads come and go with stacks, which the allocator takes some of late: more of them tell that from a leak."""


def growth(samples, cycles):
    """Bytes per cycle that it surely grows by, in the second half."""
    return lower_bound(without_jumps(samples[50:])) / (cycles / 100)


def test_a_leak_would_be_found():
    """The rule tells a leak from noise: a kilobyte per cycle in pages is found, the stack of a thread and a table that doubles are not."""
    noise = np.random.default_rng(1).integers(0, 8, 100) * 4096
    assert growth(np.arange(100) * 10_240 // 4096 * 4096 + noise, 1000) > MOST_BYTES
    assert growth(np.arange(100) * 2_000 + noise // 1024, 1000) > MOST_BYTES
    assert growth(noise + (np.arange(100) > 70) * (8 << 20) + (np.arange(100) > 90) * 65_536, 1000) < MOST_BYTES


def measured(what):
    """Growth of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(CYCLES[what])],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "HOME": str(Path.home()),
            "MALLOC_ARENA_MAX": "1",
            "PYTHONMALLOC": "malloc",
            "OTEL_TRACES_EXPORTER": "none",
        },
    )
    assert done.returncode == 0, done.stderr
    samples = [int(line) for line in done.stdout.split()]
    assert len(samples) == 100
    return growth(samples, CYCLES[what])


@pytest.mark.parametrize("what", CYCLES)
def test_memory_does_not_grow(what):
    """In the second half of many profiles, threads within one profile, or pairs of instrumentations, memory in use has no slope.

    A leak is there each time; what a busy machine delays is not.
    """
    growths: list[float] = []
    while len(growths) < 3 and min(growths, default=MOST_BYTES + 1) > MOST_BYTES:
        growths.append(measured(what))
    assert min(growths) <= MOST_BYTES, growths
