"""Tiny models of transformers with random weights that generate, and what torch's spans say of it, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.sdk.trace import ReadableSpan

GENERATE = "text_completion LlamaForCausalLM"
"""The name of a call of :func:`decoder`, which has no name."""
PREFILL, DECODE = "torch.phase.prefill", "torch.phase.decode"
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
_ENDLESS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


def decoder(**options: Any) -> Any:
    """A decoder that never ends by itself."""
    config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=4096, **_SIZES, **_ENDLESS, **options)
    return transformers.LlamaForCausalLM(config).eval()


def translator() -> Any:
    """An encoder with a decoder, which does not either."""
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    config = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes, **_ENDLESS)
    return transformers.T5ForConditionalGeneration(config).eval()


def prompts(batch: int = 1, length: int = 5) -> torch.Tensor:
    """So many prompts of so many tokens, none of which is padding."""
    return torch.arange(1, 1 + batch * length).remainder(31).add(1).reshape(batch, length)


def named(spans: Iterable[ReadableSpan], name: str) -> list[ReadableSpan]:
    """The spans of that name."""
    return [span for span in spans if span.name == name]


def calls(spans: Iterable[ReadableSpan]) -> list[ReadableSpan]:
    """The spans of calls of ``generate``, whatever they are named."""
    return [span for span in spans if span.attributes.get("torch.phase.name") == "generate"]


def below(spans: Iterable[ReadableSpan], parent: Any) -> list[ReadableSpan]:
    """The children of a span (or of its context), by start."""
    context = getattr(parent, "context", None) or parent.get_span_context()
    found = [span for span in spans if span.parent is not None and span.parent.span_id == context.span_id]
    return sorted(found, key=lambda span: span.start_time)


class Letters:
    """A tokenizer of streamers: a letter for each token."""

    def decode(self, tokens: Any, **_: Any) -> str:
        """The letters, each followed by a space, so that a streamer hands on each at once."""
        return "".join(f"{chr(97 + int(token))} " for token in tokens)


def phases(spans: Iterable[ReadableSpan], parent: Any) -> list[ReadableSpan]:
    """The phases directly below a span, but collections of garbage, which may come at any time."""
    found = below(spans, parent)
    return [span for span in found if span.attributes.get("torch.phase.name", "gc") != "gc"]
