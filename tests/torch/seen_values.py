"""What programs see, as text that two runs have in common."""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
import random
import re
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def text_of(value: Any) -> Any:
    """A value without what differs from run to run: addresses, and the ids of processes."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {hashlib.sha1(data).hexdigest()}"  # noqa: S324
    if isinstance(value, bytes):
        # The keys of storages, which are their addresses: of eight digits on, in the heap of a program at a fixed address.
        plain = re.sub(rb"(?s)(X.{4}|\x8c.)\d{7,}", b"address", value)
        return f"{len(plain)} bytes {hashlib.sha1(plain).hexdigest()} of ours: {b'torchprof' in value}"  # noqa: S324
    if isinstance(value, dict):
        return {str(text_of(key)): text_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [text_of(each) for each in value]
    if isinstance(value, bool | int | None):
        return value
    text = value if isinstance(value, str) else repr(value)
    text = re.sub(r"0x[0-9a-f]{6,}|\b\d{12,}\b|/tmp/\S*|\bpid \d+", "#", text)
    return text if isinstance(value, str) else f"{type(value).__qualname__} {text}"


def raised_by(function: Callable[[], Any]) -> str:
    """The traceback of what it raises."""
    try:
        function()
    except BaseException:  # noqa: BLE001 - whatever it is
        return traceback.format_exc()
    return "nothing"


def randomness() -> list[Any]:
    """Where all random generators stand."""
    return [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]  # noqa: NPY002 - the global one


def attributes(model: nn.Module) -> list[Any]:
    """Of a model and of all modules in it."""
    return [[type(each).__qualname__, dict(vars(each))] for each in model.modules()]


def saved(value: Any) -> list[Any]:
    """As pickle and torch write it; pickle's by its opcodes.

    A storage's key is its address, which is a digit longer in memory that another thread was the first to have, and
    with it the length of what it stands in.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    opcodes = pickletools.genops(pickle.dumps(value, 3))  # the latest protocol that doesn't write the lengths of frames
    return [[(opcode.name, argument) for opcode, argument, _ in opcodes], buffer.getvalue()]
