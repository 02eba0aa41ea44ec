"""Facts about calls of transformers' ``generate``: from shapes of arguments and results, and from begin and end times."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace

from otel_torchprof._columns.generation import INFERENCES, OPERATION, Generation
from otel_torchprof._native import python_sources
from otel_torchprof._process.quiet import LimitedLog

from .compiled_code import leave_uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Listener = Callable[[Generation], object]

_MOST = 4096
"""Calls stored until their events are drained; beyond it the oldest are dropped."""


_RECENT_NS = 10 * 10**9

_PLACES = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
)
"""Arguments of ``generate`` that may be given by position, after the model."""


class Generations:
    """Facts about the latest calls, by the ids of their events; listeners get each request. Thread-safe under the GIL."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Generation] = OrderedDict()
        self._listeners: tuple[Listener, ...] = ()
        self._output: deque[tuple[int, int, int]] = deque(maxlen=_MOST)
        """Begin and end of requests, Unix ns, and the tokens that they generated."""
        self._log = LimitedLog()

    def listen(self, listener: Listener) -> None:
        """Registers a function to be called after each request, on its thread; exceptions are logged."""
        self._listeners = (*self._listeners, listener)

    def leave(self, listener: Listener) -> None:
        """Removes a listener; no effect for an unknown one."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def known_among(self, events: Iterable[int]) -> dict[int, Generation]:
        """Known facts about these events, by event id."""
        return {event: known for event in events if (known := self._known.get(event)) is not None}

    def note(self, event: int, generation: Generation) -> None:
        """A call has ended; ``event``: 0 where it is none."""
        if event:
            self._known[event] = generation
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        if generation.is_request:
            if generation.output_tokens is not None:
                now = time.time_ns()
                self._output.append((now - round(generation.duration * 1e9), now, generation.output_tokens))
            for listener in self._listeners:
                listener(generation)

    def token_rate(self, now: int) -> float | None:
        """Generated tokens per second at a time in Unix ns, from the requests that ended in the ten seconds before it, or the last one.

        None before the first. Thread-safe.
        """
        output = self._output.copy()
        recent = [each for each in output if each[1] >= now - _RECENT_NS] or list(output)[-1:]
        if not recent:
            return None
        begin = min(begin for begin, _, _ in recent)
        return sum(tokens for _, _, tokens in recent) * 1e9 / max(now - begin, 1)

    def failed(self, error: Exception) -> None:
        """Something could not be found out of a call, which the program does not notice."""
        self._log.warning("nothing is known of a call of generate: %s: %s", type(error).__name__, error)

    def after_fork_in_child(self) -> None:
        """Forgets everything: event ids restart in the child, and recordings that continue there register again."""
        self._known.clear()
        self._output.clear()
        self._listeners = ()
        self._log.after_fork_in_child()


shared = Generations()
"""The generations of the process."""


class GenerateCall(NamedTuple):
    """A running call, with the metadata from its arguments."""

    model: str
    batch_size: int | None
    prompt: int | None
    """Tokens of each prompt."""
    echo: int | None
    """Tokens of each sequence of the result that are not generated: a decoder's prompt."""
    prefills: int
    """Number of model calls up to the first token."""
    is_streamed: bool
    gen_ai_span: Any
    """The current span if another instrumentation created it for a call, and this is the first call in it; else None."""


def begun(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> GenerateCall | None:
    """Facts known at the begin of a call. None if a detail differs from the known versions of transformers; the call is still a phase."""
    try:
        model = arguments[0]
        given = {**keywords, **dict(zip(_PLACES, arguments[1:], strict=False))}
        prompt = _Prompt.of(model, given.get("inputs"), keywords)
        config = given.get("generation_config")
        return GenerateCall(
            model=name_of(model),
            batch_size=prompt.batch_size,
            prompt=prompt.tokens,
            echo=prompt.echo,
            prefills=_prefills(prompt.tokens, keywords, config, getattr(model, "generation_config", None)),
            is_streamed=given.get("streamer") is not None,
            gen_ai_span=_gen_ai_span(),
        )
    except Exception as error:  # noqa: BLE001 - the program's call continues
        shared.failed(error)
        return None


def ended(call: GenerateCall | None, model: Any, result: Any, error: BaseException | None) -> None:
    """Stores the result of a call; runs before its event ends, so that a drain of the event finds it."""
    try:
        timing = python_sources.generation(model)
        if call is None or timing is None:
            return
        event, duration, first_token, enclosing = timing
        generation = _generation(call, _shape(getattr(result, "sequences", result)))._replace(
            duration=duration / 1e9,
            first_token=None if first_token < 0 else first_token / 1e9,
            error_type=_class_of(error),
            is_request=not enclosing,
        )
        if call.gen_ai_span is not None and call.gen_ai_span.is_recording() and generation.is_request:
            call.gen_ai_span.set_attributes(generation.missing_in(call.gen_ai_span.attributes))
        shared.note(event, generation)
    except Exception as failure:  # noqa: BLE001 - the program's call continues
        shared.failed(failure)


def _generation(call: GenerateCall, result: tuple[int, ...]) -> Generation:
    """Creates the description of a call. ``result``: shape of the sequences; empty if unknown."""
    batch, choices, new = call.batch_size, None, None
    if len(result) == 2 and batch and call.echo is not None:  # noqa: PLR2004 - sequences and tokens
        choices, new = result[0] // batch, max(result[1] - call.echo, 0)
    return Generation(
        model=call.model,
        batch_size=batch,
        input_tokens=None if call.prompt is None or batch is None else batch * call.prompt,
        choices=choices,
        output_tokens=None if new is None else result[0] * new,
        new_tokens=new,
        is_streamed=call.is_streamed,
        duration=0.0,
        first_token=None,
        has_own_span=call.gen_ai_span is not None,
    )


class _Prompt(NamedTuple):
    """Input of a model."""

    batch_size: int | None
    tokens: int | None
    echo: int | None

    @classmethod
    def of(cls, model: Any, inputs: Any, keywords: dict[str, Any]) -> _Prompt:
        """Reads the shapes of a prompt. ``inputs``: generate's first argument; models also accept their main input by name, and embeddings."""
        ids = _shape(keywords.get("input_ids") if inputs is None else inputs)
        embeddings = _shape(keywords.get("inputs_embeds"))
        others = _shape(keywords.get(getattr(model, "main_input_name", "input_ids")))
        given = ids or embeddings or others
        is_translator = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        if not given and not is_translator:  # without input, generation starts from one start token
            return cls(1, 1, 1) if inputs is None else cls(None, None, None)
        are_ids = len(ids) == 2  # noqa: PLR2004 - prompts and tokens; other shapes are images or audio
        tokens = embeddings[1] if embeddings else ids[1] if are_ids else None
        if is_translator:
            decoder = _shape(keywords.get("decoder_input_ids"))
            # transformers prepends a start token to a decoder prompt without one, which only the values show.
            return cls(given[0] if given else None, tokens, None if decoder else 1)
        return cls(given[0], tokens, ids[1] if are_ids else 0 if embeddings else None)


def _shape(value: Any) -> tuple[int, ...]:
    """Shape of a tensor; empty for other objects."""
    return tuple(getattr(value, "shape", ()))


def _prefills(tokens: int | None, keywords: dict[str, Any], *configs: Any) -> int:
    """Number of calls of the model before the first token: the number of chunks of the prompt."""
    sizes = (keywords.get("prefill_chunk_size"), *(getattr(config, "prefill_chunk_size", None) for config in configs))
    size = next(filter(None, sizes), None)
    return -(-tokens // size) if size and tokens else 1


def name_of(model: Any) -> str:
    """The name that a model was loaded by; of a path the last part, of one that was made from a configuration its class."""
    name = str(getattr(model, "name_or_path", "") or "")
    path = PurePath(name)
    return (path.name if path.is_absolute() or name.startswith((".", "~")) else name) or type(model).__name__


def _class_of(error: BaseException | None) -> str:
    """Class of an error as on spans: qualified, except builtins. Exceptions that end a generator are not errors."""
    if error is None or isinstance(error, StopIteration | GeneratorExit):
        return ""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_spans_with_call: weakref.WeakSet[Any] = weakref.WeakSet()
"""Spans of other instrumentations that belong to a call already; each belongs to one call only."""


def _gen_ai_span() -> Any:
    span: Any = trace.get_current_span()
    attributes = (getattr(span, "attributes", None) or {}) if span.is_recording() else {}
    if attributes.get(OPERATION) not in INFERENCES or span in _spans_with_call:
        return None
    _spans_with_call.add(span)
    return span


leave_uncompiled(__name__)
