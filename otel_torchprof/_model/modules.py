"""The modules in which each event ran, as columns of dotted names, and sums by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._native.loops import add_to_parents, max_to_parents, roots_of

from .averages import grouped
from .flows import EVALUATION, forward_backward
from .frame_spans import module_calls, reported_by_hooks
from .frames import MODULE_PREFIX, frames_of
from .reductions import weights_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_torchprof._columns.batch import Batch

    from .tree import TreeView

Array = npt.NDArray[Any]


class Hierarchy(NamedTuple):
    """The modules around events."""

    rows: npt.NDArray[np.uint32]
    """Per row of the batch: index into ``texts``."""
    texts: list[str]
    """Distinct names such as ``GPT.blocks.0.attn``; the first is empty and means no module."""


class ModulePlace(NamedTuple):
    """A module, with the modules that enclose it."""

    outer: int
    """Index of the place in which it was called; 0 if in none."""
    enclosing: str
    """Name of the module in which the root was called; empty if none."""
    root: str
    path: str
    """Path in the root, as in ``named_modules()``; empty for the root itself."""
    class_name: str = ""
    """Its class without the Python module; empty if it is not known."""

    @property
    def text(self) -> str:
        """Class of the root and path, such as ``GPT.blocks.0.attn``."""
        # A submodule that is called on its own is named by its path in the model, and so are its descendants; the model's class is unknown.
        is_within = self.path == self.root or self.path.startswith(f"{self.root}.")
        parts = (self.enclosing, "" if is_within else self.root, self.path)
        return ".".join(part for part in parts if part)


_NOWHERE = ModulePlace(0, "", "", "")


class ModuleTree(NamedTuple):
    """The modules that were called, and the events in them."""

    place: npt.NDArray[np.int64]
    """Per row of the batch: index into ``places`` of the module itself, or of the nearest one around the event."""
    places: list[ModulePlace]
    """Modules by the modules around them, the outer ones first; the first means no module."""
    is_call: npt.NDArray[np.bool_]
    """Per row, whether it is the call of a module."""
    is_backward: npt.NDArray[np.bool_]
    """Per row, whether it has the module of a forward operator: backward functions outside of modules, and their descendants."""


def module_hierarchy(batch: Batch) -> Hierarchy:
    """Returns the nearest enclosing module of each event as class and path: ``GPT.blocks.0.attn``; for a module, the module itself.

    A name begins with the class of the root, the top-level module that was called, and continues as in ``named_modules()``. The name of a
    module that is no submodule of its caller follows the caller's name: ``GPT.blocks.0.Adapter.down``.

    Backward functions outside of modules, and their descendants, have the module of the forward operator.

    Without modules, costs one comparison of a column; else some 100 ns per event. Thread-safe.
    """
    is_module = batch["kind"] == int(Kind.MODULE)
    if not is_module.any():
        return Hierarchy(np.zeros(len(batch), dtype=np.uint32), [""])
    tree = _tree(batch, is_module)
    texts: dict[str, int] = {}
    index = np.array([texts.setdefault(place.text, len(texts)) for place in tree.places], dtype=np.uint32)
    return Hierarchy(index[tree.place], list(texts))


def module_tree(batch: Batch) -> ModuleTree | None:
    """Returns the called modules, as :func:`module_hierarchy` names them; None if there are none.

    On threads without events of modules these are the calls of modules among the Python calls. Such a call has the module's full name if
    that was noted, else its own: ``nn.Module: Linear_0``. Costs some 100 ns per event. Thread-safe.
    """
    is_module, is_frame = batch["kind"] == int(Kind.MODULE), frames_of(batch)
    if is_frame is not None:
        is_call = is_frame & module_calls(batch.names, batch["name"])
        is_module |= is_call & ~reported_by_hooks(batch, is_frame)
    return _tree(batch, is_module) if is_module.any() else None


def _tree(batch: Batch, is_module: Array) -> ModuleTree:
    parent = batch["parent"].astype(np.int64)
    place_of_event = np.zeros(len(batch), dtype=np.int64)
    nearest = roots_of(np.where(is_module, -1, parent))
    place_of_event[is_module], places = _places(batch, np.flatnonzero(is_module), nearest[parent], is_module)
    place, is_backward = place_of_event[nearest], np.zeros(len(batch), dtype=np.bool_)
    backward, of_forward = _backward(batch, place)
    if backward.size:
        # From here on, descendants take their module from these events, too.
        place_of_event[backward] = of_forward
        is_backward[backward] = True
        nearest = roots_of(np.where(is_module | is_backward, -1, parent))
        place, is_backward = place_of_event[nearest], is_backward[nearest]
    return ModuleTree(place, places, is_module, is_backward)


def _places(
    batch: Batch, modules: Array, enclosing: Array, is_module: Array
) -> tuple[npt.NDArray[np.int64], list[ModulePlace]]:
    """Returns for each module the index of its place, and the places; works from the root inwards, once per combination."""
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
    return number[modules], places


def _numbered(
    batch: Batch, places: list[ModulePlace], numbers: dict[tuple[int, int], int], outer: int, packed: int
) -> int:
    """Returns the number of the place of a module with a name, inside another place; creates it if needed."""
    known = numbers.get((outer, packed))
    if known is not None:
        return known
    places.append(_place(batch, places[outer], outer, packed))
    numbers[outer, packed] = len(places) - 1
    return len(places) - 1


def _place(batch: Batch, above: ModulePlace, outer: int, packed: int) -> ModulePlace:
    """The place of a module in another one. ``packed``: twice the number of its name, and 1 more for a root."""
    name, is_root, class_name = batch.names[packed >> 1], bool(packed & 1), ""
    if name.startswith(MODULE_PREFIX):  # a call that the tracer of Python calls recorded
        info = None if batch.frame_info is None else batch.frame_info.modules.get(packed >> 1)
        class_name = name.removeprefix(MODULE_PREFIX).rpartition("_")[0]
        if info is None:
            return ModulePlace(outer, "", "", name, class_name)
        name, is_root = info.qualified_name, info.qualified_name == info.root
    if is_root or not outer:
        return ModulePlace(outer, above.text, name, "", class_name)
    return ModulePlace(outer, above.enclosing, above.root, name, class_name)


def _backward(batch: Batch, place: Array) -> tuple[Array, Array]:
    """Returns rows of backward functions outside of modules, and of the engine's events around them, and their new places."""
    forward, backward = forward_backward(batch)
    chosen = (place[backward] == 0) & (place[forward] != 0)
    backward, of_forward = backward[chosen], place[forward[chosen]]
    engine = batch.names.matching((), (EVALUATION,))
    if engine is None:
        return backward, of_forward
    enclosing = batch["parent"][backward]
    by_engine = (enclosing >= 0) & engine[batch["name"][enclosing]]
    return np.concatenate((backward, enclosing[by_engine])), np.concatenate((of_forward, of_forward[by_engine]))


# ---- Sums by module ----

NO_MODULE = "(no module)"
"""Name of the entry for events in no module."""


@dataclass(frozen=True, slots=True)
class ModuleSums:
    """Sums over the calls of a module, or over the backward functions of its forward operators."""

    name: str
    """As in :attr:`Hierarchy.texts`; :data:`NO_MODULE` for what is in none."""
    class_name: str
    is_backward: bool
    calls: int
    """Calls of the module, or backward functions of its forward operators and of those of modules inside it."""
    own: Mapping[str, int]
    """Sums over the events whose nearest module it is."""
    total: Mapping[str, int]
    """Sums with those of modules called inside it. A call inside a call of the same module counts once."""
    peaks: Mapping[str, int]


def sums_by_module(
    tree: ModuleTree, view: TreeView, amounts: Mapping[str, Array], peaks: Mapping[str, Array]
) -> Iterator[ModuleSums]:
    """Yields the sums of each module by first call, its backward pass behind it; at the end :data:`NO_MODULE`, if there is any.

    Args:
        tree: the modules of the view's batch.
        view: its events, with modules.
        amounts: int64 columns over the view to add up, each event's own.
        peaks: columns over the view, from 0, of which the largest value counts.

    Each event counts in one entry's ``own``, so these add up to the sums of the columns. Costs 15 ns per event, some 10 us per place.
    """
    code, count = tree.place * 2 + tree.is_backward, len(tree.places)
    found = grouped(code[view.rows], 2 * count, len(view), amounts, peaks)
    used = code[view.rows[found.first]]
    groups = _module_groups(tree.places)

    def spread(column: Array, of_others: int = 0) -> Array:
        by_place = np.full(2 * count, of_others, dtype=np.int64)
        by_place[used] = column
        return by_place.reshape(count, 2)

    calls = groups.added(_calls(view.batch, tree, code).reshape(count, 2))
    sums = {name: groups.added(spread(column)) for name, column in found.amounts.items()}
    highest = {name: groups.highest(spread(column)) for name, column in found.peaks.items()}
    is_there = groups.highest(spread(np.ones(len(used))))
    begun = np.full(len(groups.names), len(view), dtype=np.int64)
    np.minimum.at(begun, groups.of_place, spread(found.first, len(view))[:, 0])
    for number in (*(np.argsort(begun[1:], kind="stable") + 1).tolist(), 0):
        for at in [(number, part) for part in np.flatnonzero(is_there[number]).tolist()]:
            yield ModuleSums(
                groups.names[number] or NO_MODULE,
                groups.classes[number],
                bool(at[1]),
                (calls.total if at[1] else calls.own).item(at),
                {name: of_name.own.item(at) for name, of_name in sums.items()},
                {name: of_name.total.item(at) for name, of_name in sums.items()},
                {name: of_name.item(at) for name, of_name in highest.items()},
            )


class _ModuleTotals(NamedTuple):
    """By module: what is its own, and with that of modules inside it; each with the forward pass and the backward pass."""

    own: Array
    total: Array


class _ModuleGroups(NamedTuple):
    """The places of each module."""

    names: list[str]
    """By module; that of no module is first."""
    classes: list[str]
    of_place: Array
    """Index into ``names``."""
    outer: Array
    """By place, the place around it, -1 for none."""
    is_outermost: Array
    """By place, whether it is in no other place of the same module."""

    def added(self, by_place: Array) -> _ModuleTotals:
        """The sums of each module, from those of its places."""
        total = np.column_stack([add_to_parents(self.outer, np.ascontiguousarray(part)) for part in by_place.T])
        own_sums, sums = np.zeros((2, len(self.names), 2), dtype=np.int64)
        np.add.at(own_sums, self.of_place, by_place)
        np.add.at(sums, self.of_place[self.is_outermost], total[self.is_outermost])
        return _ModuleTotals(own_sums, sums)

    def highest(self, by_place: Array) -> Array:
        """The highest value of each module and of what is inside it."""
        highest = np.column_stack([max_to_parents(self.outer, np.ascontiguousarray(part)) for part in by_place.T])
        values = np.zeros((len(self.names), 2), dtype=np.int64)
        np.maximum.at(values, self.of_place, highest)
        return values


def _module_groups(places: list[ModulePlace]) -> _ModuleGroups:
    texts: dict[str, int] = {}
    of_place = [texts.setdefault(place.text, len(texts)) for place in places]
    classes = [""] * len(texts)
    is_outermost = np.ones(len(places), dtype=np.bool_)
    for number, place in enumerate(places):
        classes[of_place[number]] = classes[of_place[number]] or place.class_name
        outer = place.outer
        while outer > 0 and of_place[outer] != of_place[number]:
            outer = places[outer].outer
        is_outermost[number] = outer <= 0
    # Modules are in no module here: its sums are its own.
    outer_places = np.array([place.outer or -1 for place in places], dtype=np.int32)
    return _ModuleGroups(list(texts), classes, np.array(of_place), outer_places, is_outermost)


def _calls(batch: Batch, tree: ModuleTree, code: Array) -> npt.NDArray[np.int64]:
    """The number of calls of each place, and of its backward functions."""
    weights = weights_of(batch)
    rows = np.flatnonzero(tree.is_call | (tree.is_backward & (batch["scope"] == int(Scope.BACKWARD_FUNCTION))))
    calls = np.zeros(2 * len(tree.places), dtype=np.int64)
    np.add.at(calls, code[rows], 1 if weights is None else weights.calls[rows])
    return calls
