"""What ``opentelemetry-instrument`` and configuration files find by the package's entry point: programs that say nothing of torch's spans in their code."""

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
"""What a configuration file has as a mapping: the keywords of these."""


class ZeroCodeInstrumentor(BaseInstrumentor):
    """:class:`TorchInstrumentor`, which it instruments with, but for the policy that counts where nobody gives one."""

    def instrument(self, **given: Any) -> None:
        """As :meth:`TorchInstrumentor.instrument`. Again without another argument it does nothing: a file's program comes here twice."""
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
                check_names(kind.__name__, value, [each.name for each in fields(kind) if each.init])
                given[name] = kind(**value)
        if given.get("detail", config.DETAIL.read()) in _WITH_DETAIL:
            given = {"policy": policy_without_code(), **given}
        TorchInstrumentor().instrument(**{"skip_dep_check": True, **given})

    def _uninstrument(self, **_: Any) -> None:
        TorchInstrumentor().uninstrument()
