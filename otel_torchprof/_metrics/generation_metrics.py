"""Calls of transformers' ``generate`` as the metrics of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.generation import INPUT_TOKENS, MODEL, OPERATION, OUTPUT_TOKENS, PROVIDER, TOKEN_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import Meter

    from otel_torchprof._columns.generation import Generation

SCOPE = "otel_torchprof.generate"
"""The instrumentation scope: its schema is that of these conventions, and not that of this package's other metrics."""
ERROR = "error.type"

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = tuple(4**power for power in range(14))
"""Upper bounds, as the conventions have them: seconds, and numbers of tokens."""


class GenerationMetrics:
    """The histograms. Any thread; some 50 us per call, in the thread of that, whose current span exemplars point to.

    A program that calls ``generate`` is the server of its model, so it reports a server's metrics. Of tokens the conventions have a
    client's metric only, which is reported too, unless another instrumentation has a span for the call: it counts them itself.

    Args:
        meter: of the provider, with :data:`SCOPE`.
        is_heard: whether anybody reads.
    """

    def __init__(self, meter: Meter, is_heard: Callable[[], bool]) -> None:
        self.meter = meter
        self._is_heard = is_heard
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Duration of a call of generate.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to the first token of a call of generate that returned.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per further token of a sequence after the first, for calls of generate that returned.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of prompt tokens and of generated tokens.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )

    def record(self, generation: Generation) -> None:
        """One call; of one that failed its duration only."""
        if not self._is_heard():
            return
        known = generation.gen_ai()
        attributes: dict[str, Any] = {key: known[key] for key in (OPERATION, PROVIDER, MODEL)}
        if generation.error_type:
            self._duration.record(generation.duration, {**attributes, ERROR: generation.error_type})
            return
        self._duration.record(generation.duration, attributes)
        if (seconds := generation.time_to_first_token) is not None:
            self._first_token.record(seconds, attributes)
        if (seconds := generation.time_per_output_token) is not None:
            self._per_token.record(seconds, attributes)
        for token_type, key in (("input", INPUT_TOKENS), ("output", OUTPUT_TOKENS)):
            tokens: Any = known[key]
            if tokens is not None and not generation.has_own_span:
                self._tokens.record(tokens, {**attributes, TOKEN_TYPE: token_type})
