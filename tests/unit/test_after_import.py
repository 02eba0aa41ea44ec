"""What waits for the import of a module: done once, now or then, and never seen by the import. Where modules are, without it."""

from __future__ import annotations

import _imp
import importlib
import importlib.util
import logging
import sys
import threading

import pytest

import otel_torchprof as otp
from otel_torchprof._process import after_import
from otel_torchprof._process.after_import import is_there, spec_of, when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module that can be imported and was not."""
    name = "awaited_module"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    after_import._waiting.pop(name, None)


def test_now(module):
    """The action runs at once where the module is imported already."""
    imported = importlib.import_module(module)
    seen = []
    when_imported(module, seen.append)
    assert seen == [imported]


def test_later(module):
    """The action runs once, when the module has been executed, and gets it; the module's own loader is there again."""
    seen = []
    when_imported(module, lambda loaded: seen.append(loaded.value))
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [1]
    assert type(imported.__loader__) is type(imported.__spec__.loader) is importlib.machinery.SourceFileLoader
    sys.modules.pop(module)
    importlib.import_module(module)
    assert seen == [1]


def test_several_actions_in_their_order(module):
    """All who wait are told, in the order in which they came."""
    seen = []
    for number in range(3):
        when_imported(module, lambda _, number=number: seen.append(number))
    importlib.import_module(module)
    assert seen == [0, 1, 2]


def test_those_that_were_called_off_are_not_kept(module):
    """Of a hundred that wait and are called off in turn, no more than the last is kept."""
    for _ in range(100):
        when_imported(module, print)()
    assert len(after_import._waiting[module]) == 1


def test_an_action_that_raises(module, caplog):
    """An action that fails neither disturbs the import nor the other actions, and is logged."""

    def fail(_):
        raise RuntimeError("no such place")

    seen = []
    when_imported(module, fail)
    when_imported(module, seen.append)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert importlib.import_module(module).value == 1
    assert len(seen) == 1
    (record,) = caplog.records
    assert module in record.getMessage()
    assert "no such place" in caplog.text


def test_called_off(module):
    """An action that was called off does not run; calling off again, or too late, does nothing."""
    seen = []
    call_off = when_imported(module, seen.append)
    call_off()
    call_off()
    importlib.import_module(module)
    assert seen == []
    when_imported(module, seen.append)()
    assert len(seen) == 1


def test_who_only_looks_for_it(module):
    """Looking for a module does not import it, and its loader answers what it always does."""
    seen = []
    when_imported(module, seen.append)
    spec = importlib.util.find_spec(module)
    assert seen == []
    assert "value = 1" in spec.loader.get_source(module)
    importlib.import_module(module)
    assert len(seen) == 1


def test_a_module_that_is_not_there():
    """An awaited module that does not exist fails to import as ever."""
    seen = []
    call_off = when_imported("no_module_of_this_name", seen.append)
    with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
        importlib.import_module("no_module_of_this_name")
    assert seen == []
    call_off()
    after_import._waiting.pop("no_module_of_this_name")


def test_a_module_that_fails(module, tmp_path):
    """When the import fails the action waits on, for one that succeeds."""
    (tmp_path / f"{module}.py").write_text("raise ValueError('broken')\n")
    seen = []
    when_imported(module, seen.append)
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(module)
    assert seen == []
    (tmp_path / f"{module}.py").write_text("value = 'mended'\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert [loaded.value for loaded in seen] == ["mended"]


def test_other_finders_are_asked(module, monkeypatch):
    """A module that another finder provides is told of too, also when that finder asks all finders itself."""

    class Asks(importlib.abc.MetaPathFinder):
        asking = False

        def find_spec(self, fullname, path, target=None):
            if fullname != module or self.asking:
                return None
            self.asking = True
            spec = importlib.util.find_spec(fullname)
            self.asking = False
            return spec

    for place in (0, 1):
        seen = []
        when_imported(module, seen.append)
        finders = [finder for finder in sys.meta_path if not isinstance(finder, Asks)]
        monkeypatch.setattr(sys, "meta_path", [*finders[:place], Asks(), *finders[place:]])
        importlib.import_module(module)
        assert len(seen) == 1
        sys.modules.pop(module)


def test_while_another_thread_imports_it(module, tmp_path):
    """Asked while another thread is importing the module, the action runs when that is done, on the whole module."""
    (tmp_path / f"{module}.py").write_text("import gate\ngate.entered.set()\ngate.open.wait(60)\nvalue = 'whole'\n")
    gate = type(sys)("gate")
    gate.entered, gate.open = threading.Event(), threading.Event()
    sys.modules["gate"] = gate
    try:
        importing = threading.Thread(target=importlib.import_module, args=(module,))
        importing.start()
        assert gate.entered.wait(60)
        seen = []
        asking = threading.Thread(target=when_imported, args=(module, lambda loaded: seen.append(loaded.value)))
        asking.start()
        assert seen == []
        gate.open.set()
        importing.join()
        asking.join()
        assert seen == ["whole"]
    finally:
        del sys.modules["gate"]


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

    def recorded():
        with otp.profile() as prof, otp.record_function("label"):
            pass
        return {row.key for row in prof.key_averages()}

    assert "label" in recorded()  # so that it is imported: of such a finder Python up to 3.11 warns at each import
    monkeypatch.setattr(sys, "meta_path", [FindsNothing(), *sys.meta_path])
    assert is_there("json")
    assert not is_there("there_is_no_such_module")
    assert "label" in recorded()


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
