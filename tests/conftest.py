"""Settings for all tests."""

import gc
import os

import pytest
from device_process import pytest_configure, pytest_runtest_protocol
from hypothesis import settings

__all__ = ["pytest_configure", "pytest_runtest_protocol", "simulated"]

# No test asserts a time, so none has a deadline. On a build server the examples are the same each time: what a random one
# finds there would stop a change that has nothing to do with it. By hand they are new each time, and find it here.
settings.register_profile("default", deadline=None)
settings.register_profile("server", deadline=None, derandomize=True)
settings.load_profile("server" if os.environ.get("CI") else "default")


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
