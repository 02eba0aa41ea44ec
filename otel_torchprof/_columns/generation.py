"""Calls of transformers' ``generate``, described with the terms of OpenTelemetry's conventions for generative AI.

Names and values are those of the conventions at the version of :data:`SCHEMA_URL`, https://github.com/open-telemetry/semantic-conventions-genai,
which are in development and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
"""The version of the conventions that these names are of."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
CHOICES = "gen_ai.request.choice.count"
STREAM = "gen_ai.request.stream"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

TEXT_COMPLETION = "text_completion"
"""The value of :data:`OPERATION`."""
INFERENCES = frozenset({"chat", TEXT_COMPLETION, "generate_content"})
"""Operation names of spans of one model call; spans of an agent or a workflow contain any number of those."""
TRANSFORMERS = "huggingface.transformers"
"""The value of :data:`PROVIDER`: the conventions have none for a library, and allow others than theirs."""

BATCH_SIZE = "torch.generate.batch_size"
TIME_TO_FIRST_TOKEN = "torch.generate.time_to_first_token"  # noqa: S105 - as above
TIME_PER_OUTPUT_TOKEN = "torch.generate.time_per_output_token"  # noqa: S105 - as above

AttributeValue = str | bool | int | float


class Generation(NamedTuple):
    """One call of ``generate``: from shapes and clocks, never from the values of tensors. Immutable; None: not known."""

    model: str
    """The name that it was loaded by, else its class."""
    batch_size: int | None
    """Prompts."""
    input_tokens: int | None
    """Sum over all prompts, padding included."""
    choices: int | None
    """Sequences that were generated for each prompt."""
    output_tokens: int | None
    """Generated for all of them together, padding of those that ended early included."""
    new_tokens: int | None
    """Generated tokens per sequence."""
    is_streamed: bool
    """Whether a streamer was given."""
    duration: float
    """Seconds."""
    first_token: float | None
    """Seconds until the first token was there."""
    error_type: str = ""
    """Class of the exception that left it."""
    is_request: bool = True
    """Whether it answers a request itself: an assistant's does not, which runs inside of another one."""
    has_own_span: bool = False
    """Whether another instrumentation has a span for it, which the conventions' attributes are on."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds; of a call that made no more than one token all of it."""
        return self.duration if self.first_token is None and self.new_tokens == 1 else self.first_token

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token of a sequence after its first; None where there are no more, or it is not known when that was."""
        if self.first_token is None or self.new_tokens is None or self.new_tokens < 2:  # noqa: PLR2004 - the first, and one more
            return None
        return max(self.duration - self.first_token, 0.0) / (self.new_tokens - 1)

    def attributes(self) -> dict[str, AttributeValue]:
        """Attributes of the span of the call: those that are known. The conventions' are on one span of a request only."""
        attributes = self._own() if self.has_own_span or not self.is_request else {**self.gen_ai(), **self._own()}
        return {key: value for key, value in attributes.items() if value is not None}

    def missing_in(self, present: Collection[str]) -> dict[str, AttributeValue]:
        """Attributes that another instrumentation's span of the call lacks, which has those that are ``present``."""
        attributes = {**self.gen_ai(), **self._own()}
        return {key: value for key, value in attributes.items() if value is not None and key not in present}

    def gen_ai(self) -> dict[str, AttributeValue | None]:
        """Attributes that the conventions have."""
        return {
            OPERATION: TEXT_COMPLETION,
            PROVIDER: TRANSFORMERS,
            MODEL: self.model,
            CHOICES: self.choices if self.choices != 1 else None,
            STREAM: self.is_streamed or None,
            FIRST_CHUNK: self.time_to_first_token if self.is_streamed else None,
            INPUT_TOKENS: self.input_tokens,
            OUTPUT_TOKENS: self.output_tokens,
        }

    def _own(self) -> dict[str, AttributeValue | None]:
        return {
            BATCH_SIZE: self.batch_size,
            TIME_TO_FIRST_TOKEN: self.time_to_first_token,
            TIME_PER_OUTPUT_TOKEN: self.time_per_output_token,
        }
