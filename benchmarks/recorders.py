"""The contestants: what records the operators while some work runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import peers
import torch
from harness import quiet
from torch.profiler import _ExperimentalConfig

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import TracerProvider


@contextlib.contextmanager
def empty_callback(*, shapes: bool = False) -> Iterator[None]:
    """An observer that does nothing: what torch itself takes for having one."""
    handle = peers.load().peers_observe(int(shapes))
    try:
        yield
    finally:
        peers.load().peers_unobserve(handle)


def ours(*, shapes: bool = False, memory: bool = False, **arguments: Any) -> otp.profile:
    """The package at hand."""
    return otp.profile(record_shapes=shapes, profile_memory=memory, **arguments)


@contextlib.contextmanager
def empty_reporter() -> Iterator[None]:
    """A receiver of the allocator's events that does nothing: what torch itself takes for having one."""
    peers.load().peers_observe_memory()
    try:
        yield
    finally:
        peers.load().peers_unobserve_memory()


@contextlib.contextmanager
def kineto(
    *, shapes: bool = False, memory: bool = False, with_stack: bool = False, verbose: bool = False
) -> Iterator[Any]:
    """Torch's own profiler."""
    profiler = torch.autograd.profiler.profile(
        use_kineto=True,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=with_stack,
        experimental_config=_ExperimentalConfig(verbose=True) if verbose else None,
    )
    with quietly(profiler):
        yield profiler


@contextlib.contextmanager
def quietly(profiler: Any) -> Iterator[None]:
    """Records with a profiler of torch, which writes to standard error when it starts and stops."""
    with quiet():
        profiler.__enter__()
    try:
        yield
    finally:
        with quiet():
            profiler.__exit__(None, None, None)


@contextlib.contextmanager
def instrumented(provider: TracerProvider, detail: str, **options: Any) -> Iterator[str]:
    """Torch is instrumented in this detail while a block runs."""
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail=detail, **options)
    try:
        yield detail
    finally:
        otp.TorchInstrumentor().uninstrument()
