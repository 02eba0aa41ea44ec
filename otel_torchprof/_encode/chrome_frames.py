"""What Chrome JSON has of Python's calls: their numbers, their threads, and the stacks of all events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.distinct import distinct_values
from otel_torchprof._columns.schema import Kind
from otel_torchprof._tree.frames import frames_of, python_ids
from otel_torchprof._tree.modules import Hierarchy
from otel_torchprof._tree.stacks import plain_stacks

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch, Names

Array = npt.NDArray[Any]


def frame_threads(batch: Batch) -> list[int]:
    """The threads with calls, by their first one: indices into ``Batch.threads``."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return []
    thread, start = batch["thread"][is_frame], batch["start"][is_frame]
    first = np.full(len(batch.threads), np.iinfo(np.int64).max)
    np.minimum.at(first, thread, start)
    order: list[int] = np.argsort(first, kind="stable").tolist()
    return order[: len(distinct_values(thread))]


def with_called_modules(batch: Batch, enclosing: Hierarchy) -> Hierarchy:
    """The modules around events, and of the call of a module that module: ``GPT.blocks.0.attn``, where it is known."""
    modules = {} if batch.frame_info is None else batch.frame_info.modules
    if not modules:
        return enclosing
    texts, by_name = list(enclosing.texts), np.zeros(len(batch.names), dtype=np.uint32)
    for name, module in modules.items():
        by_name[name] = len(texts)
        is_root = module.qualified_name == module.root
        texts.append(module.root if is_root else f"{module.root}.{module.qualified_name}")
    own = np.where(batch["kind"] == Kind.FRAME, by_name[batch["name"]], 0)
    return Hierarchy(np.where(own > 0, own, enclosing.rows).astype(np.uint32), texts)


def python_columns(batch: Batch, number_threads: bool) -> dict[str, Array]:
    """The columns of ``otp_chrome_events`` that are of calls; none where there are none."""
    ids = python_ids(batch)
    if ids is None:
        return {}
    columns = {"python_id": ids.own, "python_parent_id": ids.caller, "python_module_id": ids.module}
    if number_threads:
        numbers = np.zeros(len(batch.threads), dtype=np.int64)
        threads = frame_threads(batch)
        numbers[threads] = np.arange(len(threads))
        columns["python_threads"] = numbers
    return columns


def stack_columns(batch: Batch) -> tuple[Names, dict[str, Array]]:
    """The names of the batch with those that only stacks have, and the columns of ``otp_chrome_events`` that are of stacks."""
    codes, stacks = plain_stacks(batch)
    if len(stacks) == 1:
        return batch.names, {}
    return stacks.names, {"stack": codes, "stack_outer": stacks.outer, "stack_name": stacks.name}
