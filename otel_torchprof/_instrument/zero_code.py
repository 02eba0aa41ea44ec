"""What ``opentelemetry-instrument`` finds by the package's entry point: programs that say nothing of torch's spans in their code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_torchprof import config
from otel_torchprof._sampling.span_policy import policy_without_code

from .instrumentor import TorchInstrumentor

if TYPE_CHECKING:
    from collections.abc import Collection

_WITH_DETAIL = ("modules", "ops", "frames")


class ZeroCodeInstrumentor(BaseInstrumentor):
    """:class:`TorchInstrumentor`, which it instruments with, but for the policy that counts where nobody gives one."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The versions of torch that are instrumented."""
        return TorchInstrumentor().instrumentation_dependencies()

    def _instrument(self, **kwargs: Any) -> None:
        policy = policy_without_code() if config.DETAIL.read() in _WITH_DETAIL else None
        TorchInstrumentor().instrument(**{"policy": policy, "skip_dep_check": True, **kwargs})

    def _uninstrument(self, **kwargs: Any) -> None:
        TorchInstrumentor().uninstrument(**kwargs)
