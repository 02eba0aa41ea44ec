"""The entry point for ``opentelemetry-instrument`` and configuration files, which instrument torch without a change of code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_torchprof import config
from otel_torchprof._export.span_policy import SpanPolicy, policy_without_code
from otel_torchprof._record.frame_filter import FrameFilter
from otel_torchprof.errors import check_names

from .instrumentor import TorchInstrumentor

if TYPE_CHECKING:
    from collections.abc import Collection

_WITH_DETAIL = ("modules", "ops", "frames")
_FROM_A_FILE = {"policy": SpanPolicy, "frames": FrameFilter}
"""Arguments that are mappings in a configuration file, and the classes that are constructed from them."""


class ZeroCodeInstrumentor(BaseInstrumentor):
    """Calls :class:`TorchInstrumentor`, with another default policy."""

    def instrument(self, **given: Any) -> None:
        """As :meth:`TorchInstrumentor.instrument`. No effect if called again without arguments, as with a configuration file."""
        if self.is_instrumented_by_opentelemetry:
            TorchInstrumentor().instrument(**{"skip_dep_check": True, **given})
        else:
            super().instrument(**given)

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of torch that are instrumented."""
        return TorchInstrumentor().instrumentation_dependencies()

    def _instrument(self, **given: Any) -> None:
        for name, kind in _FROM_A_FILE.items():
            if isinstance(value := given.get(name), Mapping):
                check_names(kind.__name__, value, [field.name for field in fields(kind) if field.init])
                given[name] = kind(**value)
        if given.get("detail", config.DETAIL.read()) in _WITH_DETAIL:
            given = {"policy": policy_without_code(), **given}
        TorchInstrumentor().instrument(**{"skip_dep_check": True, **given})

    def _uninstrument(self, **_: Any) -> None:
        TorchInstrumentor().uninstrument()
