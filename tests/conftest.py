"""Settings for all tests."""

import gc
import os
import random
import signal
import sys
import threading

import pytest
from device_process import pytest_configure, pytest_runtest_protocol
from hypothesis import settings

__all__ = ["pytest_configure", "pytest_runtest_protocol", "simulated"]

# Every run of the tests draws the same examples, on every machine: one that fails fails again, and a change is not stopped by what
# has nothing to do with it. New ones are drawn by `make explore`.
settings.register_profile("same", deadline=None, derandomize=True)
# `make test`: fewer, where a test does not say how many.
settings.register_profile("some", settings.get_profile("same"), max_examples=25)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("same")

_ENDLESS = {"otel-torchprof-drain", "otel-torchprof-energy"}
"""Threads of ours that end when they are told to."""
_HASH_SEED = os.environ.get("PYTHONHASHSEED", "random")

# For the processes that tests start. That of the tests itself has it from `make`.
os.environ.setdefault("PYTHONHASHSEED", "0")
# Before torch is imported: its threads sleep where they wait for one another. By default they spin, which on a machine with no
# more cores than processes takes the time of the one that is waited for, and made tests of small models four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy's BLAS ends its threads at a fork, and Python warns of a fork where it still sees one: one program in thirteen had a warning
# that the others had not.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A shell ignores it in what it begins in the background, and processes inherit that: tests that interrupt some would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header():
    """Says what repeats a run whose outcome depends on the order of a set."""
    return f"PYTHONHASHSEED: {_HASH_SEED}"


@pytest.fixture(autouse=True)
def _seeded():
    """Starts the generators that tests draw from without a seed of their own."""
    random.seed(0)
    for module in ("numpy", "torch"):
        if module in sys.modules:
            seed = getattr(sys.modules[module], "manual_seed", None) or sys.modules[module].random.seed
            seed(0)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """A thread that a test has left draining would take time, and memory, from all tests that come after it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name in _ENDLESS and thread not in before]
    for thread in left:
        thread.join(10)  # a hang that the test let go of ends by itself
    assert not any(thread.is_alive() for thread in left), f"{left}: shut the processor down, or uninstrument"


@pytest.fixture(scope="module", autouse=True)
def _collections_look_at_what_tests_make():
    """Takes what is there before a file's tests out of the garbage collector's sight: many of them collect, some by the hundred.

    With torch imported a full collection looks at hundreds of thousands of objects of modules, none of which a test has made.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def simulated():
    """The simulated device as it is at the beginning; for tests with the marker ``simulated_device``."""
    from simulated_device import device

    found = device()
    found.reset()
    yield found
    found.reset()
