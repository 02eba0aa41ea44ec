"""The modules in which each event ran, as columns of dotted names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._native.loops import roots_of

from .flows import EVALUATION, forward_backward

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]


class Hierarchy(NamedTuple):
    """The modules around events."""

    rows: npt.NDArray[np.uint32]
    """Per row of the batch: index into ``texts``."""
    texts: list[str]
    """Distinct names such as ``GPT.blocks.0.attn``; the first is empty and means no module."""


class _ModulePlace(NamedTuple):
    """A module, with the modules that enclose it."""

    enclosing: str
    """Name of the module in which the root was called; empty if none."""
    root: str
    path: str
    """Path in the root, as in ``named_modules()``; empty for the root itself."""

    @property
    def text(self) -> str:
        # A submodule that is called on its own is named by its path in the model, and so are its descendants; the model's class is unknown.
        is_within = self.path == self.root or self.path.startswith(f"{self.root}.")
        parts = (self.enclosing, "" if is_within else self.root, self.path)
        return ".".join(part for part in parts if part)


_NOWHERE = _ModulePlace("", "", "")


def module_hierarchy(batch: Batch) -> Hierarchy:
    """Returns the nearest enclosing module of each event as class and path: ``GPT.blocks.0.attn``; for a module, the module itself.

    A name begins with the class of the root, the top-level module that was called, and continues as in ``named_modules()``. The name of a
    module that is no submodule of its caller follows the caller's name: ``GPT.blocks.0.Adapter.down``.

    Backward functions outside of modules, and their descendants, have the module of the forward operator.

    Without modules, costs one comparison of a column; else some 100 ns per event. Thread-safe.
    """
    is_module = batch["kind"] == Kind.MODULE
    if not is_module.any():
        return Hierarchy(np.zeros(len(batch), dtype=np.uint32), [""])
    parent = batch["parent"].astype(np.int64)
    text_of_event = np.zeros(len(batch), dtype=np.uint32)
    nearest = roots_of(np.where(is_module, -1, parent))
    text_of_event[is_module], texts = _places(batch, np.flatnonzero(is_module), nearest[parent], is_module)
    index = text_of_event[nearest]
    backward, of_forward = _backward(batch, index)
    if backward.size:
        # From here on, descendants take their module from these events, too.
        text_of_event[backward] = of_forward
        gives = is_module.copy()
        gives[backward] = True
        index = text_of_event[roots_of(np.where(gives, -1, parent))]
    return Hierarchy(index, texts)


def _places(
    batch: Batch, modules: Array, enclosing: Array, is_module: Array
) -> tuple[npt.NDArray[np.uint32], list[str]]:
    """Returns for each module the index of its text, and the texts; works from the root inwards, once per combination."""
    number = np.zeros(len(batch) + 1, dtype=np.int64)  # of each row's place; 0: none
    above = np.where((batch["parent"][modules] >= 0) & is_module[enclosing[modules]], enclosing[modules], -1)
    key = batch["name"][modules].astype(np.int64) << 1 | ((batch["flags"][modules] & Flag.ROOT) != 0)
    keys = 2 * len(batch.names)
    places, numbers = [_NOWHERE], dict[tuple[int, int], int]()
    waiting = np.arange(len(modules))
    known = np.zeros(len(batch) + 1, dtype=np.bool_)
    known[-1] = True  # parent of top-level modules
    while waiting.size:
        ready = known[above[waiting]]
        level, waiting = waiting[ready], waiting[~ready]
        # Unique per pair of place and name: a batch has fewer than 2**62 pairs.
        pairs, of_pair = np.unique(number[above[level]] * keys + key[level], return_inverse=True)
        of_new = [_numbered(batch, places, numbers, *divmod(pair, keys)) for pair in pairs.tolist()]
        number[modules[level]] = np.array(of_new, dtype=np.int64)[of_pair]
        known[modules[level]] = True
    texts = {"": 0}
    text = np.array([texts.setdefault(place.text, len(texts)) for place in places], dtype=np.uint32)
    return text[number[modules]], list(texts)


def _numbered(
    batch: Batch, places: list[_ModulePlace], numbers: dict[tuple[int, int], int], outer: int, packed: int
) -> int:
    """Returns the number of the place of a module with a name, inside another place; creates it if needed."""
    known = numbers.get((outer, packed))
    if known is not None:
        return known
    name, above = batch.names[packed >> 1], places[outer]
    is_root = bool(packed & 1) or not outer
    places.append(_ModulePlace(above.text, name, "") if is_root else _ModulePlace(above.enclosing, above.root, name))
    numbers[outer, packed] = len(places) - 1
    return len(places) - 1


def _backward(batch: Batch, index: Array) -> tuple[Array, Array]:
    """Returns rows of backward functions outside of modules, and of the engine's events around them, and their new modules."""
    forward, backward = forward_backward(batch)
    chosen = (index[backward] == 0) & (index[forward] != 0)
    backward, of_forward = backward[chosen], index[forward[chosen]]
    engine = batch.names.matching((), (EVALUATION,))
    if engine is None:
        return backward, of_forward
    enclosing = batch["parent"][backward]
    by_engine = (enclosing >= 0) & engine[batch["name"][enclosing]]
    return np.concatenate((backward, enclosing[by_engine])), np.concatenate((of_forward, of_forward[by_engine]))
