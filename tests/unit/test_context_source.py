"""The source of contexts, called as the recorder calls it: when it says that a thread's context may have changed."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import sys
import weakref

import pytest
from threaded import in_threads

from otel_torchprof._native.ffi import ffi, lib, python_sources

VARIABLE: contextvars.ContextVar[object] = contextvars.ContextVar("variable")


class Source:
    """What the extension hands to the recorder, caught by a recorder's table that only catches."""

    def __init__(self):
        self.caught = ffi.NULL
        self._callback = ffi.callback(
            "void (*)(const otp_context_source *)", lambda source: setattr(self, "caught", source)
        )
        self.table = ffi.new("otp_api *", lib.otp_get_api()[0])
        self.table.set_context_source = self._callback

    def version(self):
        """Asked without Python's lock, as cffi calls everything."""
        return self.caught.version()

    def resolve(self):
        return self.caught.resolve()


@pytest.fixture
def source():
    """A source with nobody who resolves yet."""
    caught = Source()
    python_sources.attach(int(ffi.cast("uintptr_t", caught.table)))
    yield caught
    python_sources.set_context_resolver(None)
    python_sources.attach(int(ffi.cast("uintptr_t", lib.otp_get_api())))


def test_contexts_are_followed_by_identity(source):
    """On this interpreter the fields are found, so the context is known to be the same without asking."""
    assert python_sources.set_context_resolver(lambda: 1) is True
    assert source.caught != ffi.NULL


def test_the_version_changes_with_the_variables(source):
    """Each setting and resetting of a variable gives another version than the one before; nothing else does."""
    python_sources.set_context_resolver(lambda: 1)
    before = source.version()
    assert before != 0
    assert source.version() == before
    source.resolve()
    token = VARIABLE.set(1)
    between = source.version()
    source.resolve()
    VARIABLE.reset(token)
    after = source.version()
    assert before != between != after
    assert source.version() == after


def test_each_task_has_its_own_version(source):
    """Tasks that take turns in one thread each have their version, and find it again at their next turn."""
    python_sources.set_context_resolver(lambda: 1)

    async def task(value):
        VARIABLE.set(value)
        seen = []
        for _ in range(5):
            seen.append(source.version())
            await asyncio.sleep(0)
        return set(seen)

    async def both():
        return await asyncio.gather(task("a"), task("b"))

    first, second = asyncio.run(both())
    assert len(first) == len(second) == 1
    assert first != second


def test_a_copied_context_has_the_same_version(source):
    """A task or thread that runs in a copy of this context is in the same span, and has the same version."""
    python_sources.set_context_resolver(lambda: 1)
    VARIABLE.set(1)
    assert contextvars.copy_context().run(source.version) == source.version()
    context = contextvars.copy_context()
    assert in_threads(lambda: context.run(source.version))[0] == source.version()


def test_a_thread_without_variables(source):
    """A Python thread in which no variable was ever set has a version, and another one once one is set."""
    python_sources.set_context_resolver(lambda: 1)

    def versions():
        before = source.version(), source.version()
        VARIABLE.set(1)
        return *before, source.version()

    first, again, other = in_threads(versions)[0]
    assert first == again != 0
    assert other not in (0, first)


def test_a_thread_that_python_does_not_know(source):
    """A thread without a Python state has version 0: the source cannot tell of it."""
    python_sources.set_context_resolver(lambda: 1)
    libc = ctypes.CDLL(None)
    thread, result = ctypes.c_ulong(), ctypes.c_void_p(1)
    function = ctypes.c_void_p(int(ffi.cast("uintptr_t", source.caught.version)))
    assert libc.pthread_create(ctypes.byref(thread), None, function, None) == 0
    assert libc.pthread_join(thread, ctypes.byref(result)) == 0
    assert result.value in (None, 0)


def test_an_address_is_not_used_again(source):
    """As long as a version was the last that was resolved in a thread, no other context gets it, however many come."""
    python_sources.set_context_resolver(lambda: 1)
    VARIABLE.set(object())
    resolved = source.version()
    source.resolve()
    VARIABLE.set(None)
    others = set()
    for value in range(2000):
        VARIABLE.set(value)
        others.add(source.version())
    assert resolved not in others


def test_what_is_kept_goes_with_the_next_answer_and_with_the_thread(source):
    """A thread keeps the variables that it resolved last alive: no longer than until the next time, or until its end."""
    python_sources.set_context_resolver(lambda: 1)

    class Value:
        pass

    def keep():
        value = Value()
        VARIABLE.set(value)
        source.resolve()
        VARIABLE.set(None)
        return weakref.ref(value)

    def here():
        kept = keep()
        assert kept() is not None
        source.resolve()
        gc.collect()
        return kept() is None

    assert in_threads(here)[0]
    kept = in_threads(keep)[0]
    gc.collect()
    assert kept() is None


def test_the_answer_is_the_resolvers(source):
    """resolve() runs the resolver in the context of the thread that asks, and passes on what it says."""
    python_sources.set_context_resolver(lambda: VARIABLE.get(0))

    def ask(value):
        VARIABLE.set(value)
        return source.resolve()

    for value in (0, 1, 7, 0xFFFFFFFF):
        assert contextvars.Context().run(ask, value) == value


@pytest.mark.parametrize("answer", [-1, 1 << 32, 1 << 80, None, "1"])
def test_a_bad_answer_is_no_context(source, answer):
    """An answer that is no context counts as none."""
    python_sources.set_context_resolver(lambda: answer)
    assert source.resolve() == 0


def test_a_resolver_that_raises(source):
    """An exception of the resolver counts as no context, is counted, and comes to nobody."""

    def fail():
        raise RuntimeError("not now")

    python_sources.set_context_resolver(fail)
    before = python_sources.errors()
    assert source.resolve() == 0
    assert python_sources.errors() == before + 1


def test_no_resolver(source):
    """Without a resolver the recorder is told that there is no source, and a thread that is about to ask gets no answer."""
    python_sources.set_context_resolver(lambda: 1)
    handed = source.caught
    assert python_sources.set_context_resolver(None) is False
    assert source.caught == ffi.NULL
    assert (handed.version(), handed.resolve()) == (0, 0)


def test_another_resolver_has_other_versions(source):
    """What one resolver said of a context does not count for the next, although the context is the same."""
    python_sources.set_context_resolver(lambda: 1)
    first = source.version()
    python_sources.set_context_resolver(lambda: 2)
    assert source.version() != first


def test_asked_every_time(source):
    """Where variables cannot tell, every version is another one."""
    assert python_sources.set_context_resolver(lambda: 1, False) is False
    versions = [source.version() for _ in range(100)]
    assert len(set(versions)) == 100
    assert 0 not in versions
    assert source.resolve() == 1


def test_no_references_are_lost(source):
    """Setting resolvers and asking them leaves no reference behind."""

    def resolver():
        return 3

    before = sys.getrefcount(resolver)
    for _ in range(100):
        python_sources.set_context_resolver(resolver)
        source.resolve()
    python_sources.set_context_resolver(None)
    assert sys.getrefcount(resolver) == before
