"""What is known of Python's calls besides their names: of functions, modules, optimizers and their tensors, as plain data."""

from __future__ import annotations

from bisect import bisect_right
from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

InfoField = TypeVar("InfoField")
Scalar = float | bool | str | None


@dataclass(frozen=True)
class FunctionInfo:
    """A function of Python's. Immutable."""

    qualified_name: str
    """``package.module.Class.method``; before Python 3.11 without the class or function that it stands in."""
    path: str
    """Its file, as it was compiled: ``co_filename``."""
    line: int
    """The first line of it, counted from 1; that of its first decorator."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as it was when it was looked at; its contents never are. Immutable."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; empty where the layout has none."""
    dtype: str
    """``torch.float32``: what torch writes for it, as in the next two."""
    layout: str
    """``torch.strided``."""
    device: str
    """``cpu``, ``cuda:0``."""
    storage_data_ptr: int
    """Address of the beginning of its storage, which other tensors may share; 0 where it has none."""
    impl_ptr: int
    """Address of the tensor itself: the same for two names of one tensor, as long as that lives."""


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of a module or of an optimizer. Immutable."""

    name: str
    """Of a module's: the attribute, ``weight``. Of an optimizer's: the name that it was given with, else its full name in the
    root module, ``encoder.layers.2.linear1.weight``; empty where no module that was called has it."""
    type: str
    """Class: ``torch.nn.parameter.Parameter``."""
    requires_grad: bool
    tensor: TensorInfo | None
    """None of other classes than ``torch.Tensor`` and ``torch.nn.Parameter``, whose attributes may be a program's code."""
    gradient: TensorInfo | None
    """The gradient at the first call, else at the end of the recording; None where neither had one."""
    state: Mapping[str, TensorInfo] = field(default_factory=dict, hash=False)
    """What an optimizer keeps of it, ``exp_avg`` and such; nothing of a module's parameter."""
    has_late_gradient: bool = False
    """Whether ``gradient`` is that of the end of the recording."""
    late_state: frozenset[str] = frozenset()
    """The names in ``state`` that were not there at the first call."""


@dataclass(frozen=True)
class ModuleInfo:
    """A ``torch.nn.Module`` that was called. Immutable."""

    qualified_name: str
    """Its path in the root, ``encoder.layers.2.linear1``; of the root itself, the name of its class."""
    root: str
    """``qualified_name`` of the root: the module that was called first of those that it is in."""
    class_name: str
    """With its Python module: ``torch.nn.modules.linear.Linear``."""
    parameters: tuple[ParameterInfo, ...]
    """Its own, without those of the modules in it; without those that are None."""
    self_ptr: int = 0
    """Address of the object, ``id()``, as long as that lives."""
    cls_ptr: int = 0
    """Likewise of its class."""


@dataclass(frozen=True)
class ParameterGroupInfo:
    """A group of parameters of an optimizer. Immutable."""

    hyperparameters: Mapping[str, Scalar | tuple[Scalar, ...]] = field(hash=False)
    """Those that are numbers, texts, truth values or None, or tuples of them; as they were at the first step."""
    parameters: tuple[ParameterInfo, ...]


@dataclass(frozen=True)
class OptimizerInfo:
    """A ``torch.optim.Optimizer`` that made a step. Immutable."""

    class_name: str
    """With its Python module: ``torch.optim.adam.Adam``."""
    groups: tuple[ParameterGroupInfo, ...]
    self_ptr: int = 0
    """Address of the object, ``id()``, as long as that lives."""


class MadeOnRead(Mapping[int, InfoField], Generic[InfoField]):
    """Facts by number, each made when it is first read from what was noted of it.

    Most are never read, and making all would be half the cost of a recording's stop. Immutable, hence safe to share
    between threads.
    """

    __slots__ = ("_made", "_make", "_noted")

    def __init__(self, noted: Mapping[int, Any], make: Callable[[Any], InfoField]) -> None:
        self._noted = noted
        self._make = make
        self._made: dict[int, InfoField] = {}

    def __getitem__(self, number: int) -> InfoField:
        found = self._made.get(number)
        # setdefault, so that two threads that read at the same time get the same object
        return self._made.setdefault(number, self._make(self._noted[number])) if found is None else found

    def __iter__(self) -> Iterator[int]:
        return iter(self._noted)

    def __len__(self) -> int:
        return len(self._noted)

    def __contains__(self, number: object) -> bool:
        return number in self._noted

    def __repr__(self) -> str:
        return f"<{len(self)} facts>"

    def chosen(self, numbers: Container[int]) -> MadeOnRead[InfoField]:
        """Those of these numbers."""
        return MadeOnRead({number: noted for number, noted in self._noted.items() if number in numbers}, self._make)


@dataclass(frozen=True, eq=False)
class FrameInfo:
    """What a batch knows of the calls in it. Immutable.

    Of several recordings in one batch, a number may mean a module or an optimizer in each of them: :meth:`at` gives the facts of
    one recording, where it means one only.
    """

    functions: Mapping[int, FunctionInfo] = field(default_factory=dict)
    """By the name of a call: an index into ``Batch.names``."""
    modules: Mapping[int, ModuleInfo] = field(default_factory=dict)
    """By the name of a call, too. Two classes of one name share the names of their modules; the last called has it."""
    optimizers: Mapping[int, OptimizerInfo] = field(default_factory=dict)
    """By ``fwd_thread`` of the call of an optimizer's step."""
    since: int = 0
    """When the recording started, Unix ns."""
    recordings: tuple[FrameInfo, ...] = ()
    """The facts of each recording, by start; empty where there is only one."""

    @classmethod
    def joined(cls, info: Sequence[FrameInfo]) -> FrameInfo | None:
        """The facts of several recordings of one process, of which none began before another one's end; None for none.

        Where a number means something in several, it means that of the last in ``modules`` and ``optimizers``.
        """
        if len(info) <= 1:
            return info[0] if info else None
        found = sorted((part for whole in info for part in whole.recordings or (whole,)), key=lambda part: part.since)

        def latest_first(which: str) -> ChainMap[int, Any]:
            return ChainMap(*(getattr(part, which) for part in reversed(found)))

        functions, modules, optimizers = (latest_first(which) for which in ("functions", "modules", "optimizers"))
        return cls(functions, modules, optimizers, found[0].since, tuple(found))

    def at(self, time: int) -> FrameInfo:
        """The facts that hold for a call that began at a time, Unix ns."""
        if not self.recordings:
            return self
        return self.recordings[max(bisect_right(self.recordings, time, key=lambda part: part.since) - 1, 0)]

    def chosen(self, names: Container[int], optimizers: Container[int]) -> FrameInfo:
        """Of one recording's facts those of some names and of some numbers of optimizers."""

        def some(info: Mapping[int, InfoField], numbers: Container[int]) -> Mapping[int, InfoField]:
            if isinstance(info, MadeOnRead):
                return info.chosen(numbers)
            return {number: info_field for number, info_field in info.items() if number in numbers}

        chosen = some(self.functions, names), some(self.modules, names), some(self.optimizers, optimizers)
        return FrameInfo(*chosen, since=self.since)

    def all_modules(self) -> tuple[ModuleInfo, ...]:
        """Every module, by first call; one that several recordings know, as it was in the first of them."""
        return self._all("modules", _which_module)

    def all_optimizers(self) -> tuple[OptimizerInfo, ...]:
        """Every optimizer, by first step; one that several recordings know, as it was in the first of them."""
        return self._all("optimizers", _which_optimizer)

    def _all(self, kind: str, which: Callable[[Any], object]) -> tuple[Any, ...]:
        if not self.recordings:
            return tuple(getattr(self, kind).values())
        found: list[Any] = []
        known: set[object] = set()
        for part in self.recordings:
            info = [(which(info_field), info_field) for info_field in getattr(part, kind).values()]
            found += [info_field for key, info_field in info if key not in known]
            known.update(key for key, _ in info)
        return tuple(found)


def _which_module(info: ModuleInfo) -> object:
    """Equal for one module in two recordings, of which its gradients are not."""
    parameters = tuple((p.name, p.tensor) for p in info.parameters)
    return info.qualified_name, info.root, info.class_name, parameters


def _which_optimizer(info: OptimizerInfo) -> object:
    """Equal for one optimizer in two recordings, of which gradients, state and hyperparameters are not."""
    return info.class_name, tuple(tuple(p.tensor or p.name for p in group.parameters) for group in info.groups)
