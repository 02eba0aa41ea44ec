"""A source of contexts that says what a test tells it: for the recorder's sessions that follow contexts."""

from __future__ import annotations

import contextlib
import itertools
import threading

from otel_torchprof._native.ffi import ffi, lib


class FakeContexts:
    """Contexts of the thread that made it.

    Args:
        elsewhere: what it says on other threads. 0: that it cannot tell; else, for good, that they are in no context.
        inside: called whenever it is asked for the context.
    """

    def __init__(self, elsewhere=0, inside=lambda: None):
        self._elsewhere = elsewhere
        self._inside = inside
        self._thread = threading.get_ident()
        self._versions = itertools.count(1)
        self._here = (0, next(self._versions))
        self._version = ffi.callback("uint64_t(void)", self._ask_version)
        self._resolve = ffi.callback("uint32_t(void)", self._ask_context)
        self._source = ffi.new("otp_context_source *", [self._version, self._resolve])

    def enter(self, context):
        """The thread is in another context from now on."""
        self._here = (context, next(self._versions))

    def _ask_version(self):
        return self._here[1] if threading.get_ident() == self._thread else self._elsewhere

    def _ask_context(self):
        self._inside()
        return self._here[0] if threading.get_ident() == self._thread else 0

    @contextlib.contextmanager
    def installed(self):
        """The recorder asks it meanwhile, on all threads; every other session has to be stopped by then."""
        api = lib.otp_get_api()
        api.set_context_source(self._source)
        try:
            yield self
        finally:
            api.set_context_source(ffi.NULL)
