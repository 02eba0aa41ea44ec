"""Where modules are, without importing them."""

import _imp
import importlib.util
import sys
import threading

import pytest

import otel_torchprof as otp
from otel_torchprof._process.after_import import is_there, spec_of

LONG = 60


class FindsNothing:
    """A finder as they were before Python 3.4: it has no find_spec."""


@pytest.mark.parametrize("name", ["json", "email", "otel_torchprof", "there_is_no_such_module"])
def test_as_the_import_system_finds_it(name):
    """Origin and presence of a top-level module are those of importlib's own search."""
    expected = importlib.util.find_spec(name)
    found = spec_of(name)
    assert (found and found.origin) == (expected and expected.origin)
    assert is_there(name) is (expected is not None)


def test_a_finder_without_specs(monkeypatch):
    """A finder that cannot be asked for a spec is passed over, as importlib does, and a profile records beside it."""
    monkeypatch.setattr(sys, "meta_path", [FindsNothing(), *sys.meta_path])
    assert is_there("json")
    assert not is_there("there_is_no_such_module")
    with otp.profile() as prof, otp.record_function("label"):
        pass
    assert "label" in {row.key for row in prof.key_averages()}


def test_the_lock_of_all_imports_is_not_waited_for():
    """Where an interrupt has left that lock taken for good, what is there is found all the same."""
    has_it, let_go, found = threading.Event(), threading.Event(), []

    def hold():
        _imp.acquire_lock()
        try:
            has_it.set()
            let_go.wait(LONG)
        finally:
            _imp.release_lock()

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert has_it.wait(LONG)
    threads.append(threading.Thread(target=lambda: found.append(is_there("there_is_no_such_module")), daemon=True))
    threads[1].start()
    threads[1].join(5)
    let_go.set()
    was_found = found.copy()
    for thread in threads:
        thread.join(LONG)
    assert was_found == [False]
