"""Waiting for the TracerProvider of a program that instruments first and configures the SDK later, and saying that it does not come."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from opentelemetry import trace

from otel_torchprof._export.provider import is_sdk_provider
from otel_torchprof._process import process_changes, threads
from otel_torchprof.errors import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 0.5
"""How often a TracerProvider is looked for."""
_BY_THE_COMMAND = "opentelemetry.instrumentation.auto_instrumentation"
"""Imported where ``opentelemetry-instrument`` has started the program."""
_LOOKS_UNTIL_SAID = 20
"""Ten seconds with torch: a program that is to set a provider has mostly done so."""


class ProviderWait:
    """Looks for a global TracerProvider of the SDK on a thread of its own, from its making until there is one or :meth:`give_up`.

    Where torch is imported, and there is none ten seconds later or at exit, one warning says so.

    Args:
        on_provider: called on that thread, once, soon after the provider is there; with this wait.
    """

    def __init__(self, on_provider: Callable[[ProviderWait], None]) -> None:
        self._on_provider = on_provider
        self._given_up = threads.Event()
        self._call_off = process_changes.before_exit(self._at_exit)
        threads.Thread(target=self._run, name="otel-torchprof-wait", daemon=True).start()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants to know any more."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Ends it. Again without effect."""
        self._given_up.set()
        self._call_off()

    def _run(self) -> None:
        looks = 0
        while not is_sdk_provider(trace.get_tracer_provider()):
            if self._given_up.wait(_LOOK_SECONDS):
                return
            looks += "torch" in sys.modules
            if looks == _LOOKS_UNTIL_SAID:
                _warn()
        # A program that has just set its provider is about to add processors, one of ours maybe among them.
        self._given_up.wait(_LOOK_SECONDS)
        self._on_provider(self)

    def _at_exit(self) -> None:
        if "torch" in sys.modules and not is_sdk_provider(trace.get_tracer_provider()):
            _warn()


def sets_up_the_sdk() -> bool:
    """Whether ``opentelemetry-instrument`` finds anything that sets up a TracerProvider, as opentelemetry-distro does."""
    return any(entry_points(group=group) for group in ("opentelemetry_configurator", "opentelemetry_distro"))


def _warn() -> None:
    if _BY_THE_COMMAND in sys.modules and not sets_up_the_sdk():
        why = (
            "opentelemetry-distro is not installed, without which opentelemetry-instrument sets no TracerProvider: pip install "
            "opentelemetry-distro, or call opentelemetry.trace.set_tracer_provider()"
        )
    else:
        why = (
            "no TracerProvider of opentelemetry-sdk is set: call opentelemetry.trace.set_tracer_provider(), give "
            "instrument(tracer_provider=...), or start the program with opentelemetry-instrument"
        )
    warn_once(f"torch is instrumented, and nothing is recorded, since {why}")
