"""What the system says of the loop's thread, as attributes of each step."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native.python_sources import usage_at  # noqa: E402

PAGES = 1000
STEPS = 8
ROUNDS = 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this system does not say how long a thread waits to run"
)


def trained(work, *, says_steps=False, asked=None):
    """Steps of a loop with a loader that does its work in each; their spans, without the first and the last.

    ``asked``: gets the events whose usage was looked up.
    """
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.ones(STEPS * 256, 256), batch_size=256)
    exporter = Collecting()
    stream = otp.stream(exporter, detail="steps")
    if asked is not None:
        stream._instrumentation._live.segments._usage = lambda event: asked.append(event) or usage_at(event)
    with stream:
        for x in data:
            model(x).sum().backward()
            work()
            optimizer.step()
            optimizer.zero_grad()
            if says_steps:
                stream.step()
    return [span for span in exporter.spans if span.name == "torch.step"][1:-1]


@pytest.mark.parametrize("says_steps", [False, True], ids=["learned", "said"])
def test_page_faults_and_waits_are_of_the_step_in_which_they_were(says_steps):
    """Fresh pages that a step writes to are its minor faults, and a lock that it waits for is a voluntary switch."""

    def work():
        with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as pages:
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(PAGES):
                pages[page * mmap.PAGESIZE] = 1
        there, back = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=lambda: [back.put(there.get()) for _ in range(ROUNDS)]).start()
        for number in range(ROUNDS):  # of one alone the other thread may be done before anybody waits
            there.put(number)
            back.get()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)  # steps of less than a millisecond have no such attributes

    steps = [span.attributes for span in trained(work, says_steps=says_steps)]
    assert len(steps) >= STEPS - 3
    assert all(step["torch.step.page_faults.minor"] >= PAGES for step in steps)
    assert all(step["torch.step.page_faults.major"] >= 0 for step in steps)
    # Of one step, all that it waits for may be there before it sleeps.
    assert sum(step["torch.step.context_switches.voluntary"] for step in steps) >= len(steps)


def test_time_that_a_thread_was_ready_to_run_and_did_not():
    """Beside another thread on the same processor a step waits for its turn, for less than it took."""
    before = os.sched_getaffinity(0)
    stopped = threading.Event()

    def busy():
        while not stopped.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)  # without Python's lock

    os.sched_setaffinity(0, {min(before)})
    other = threading.Thread(target=busy)
    other.start()
    try:
        steps = trained(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 40_000))
    finally:
        stopped.set()
        other.join()
        os.sched_setaffinity(0, before)
    waited = sum(span.attributes["torch.step.runnable_duration"] for span in steps)
    assert 0 < waited < sum(span.end_time - span.start_time for span in steps) / 1e9
    assert sum(span.attributes["torch.step.context_switches.involuntary"] for span in steps) > 0


def test_a_forked_child_has_nothing_of_its_parents():
    """The child counts events from the beginning: the usage of its parent's events with the same numbers is not its own."""
    asked: list[int] = []
    trained(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000), asked=asked)
    assert any(usage_at(event) for event in asked)
    child = os.fork()
    if child == 0:
        os._exit(sum(usage_at(event) is not None for event in asked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
