"""Info about recorded Python calls: functions, modules, optimizers and their tensors, as plain data."""

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
    """A Python function; ``FunctionEvent.function`` of its calls with ``with_stack``. Immutable.

    Examples:
        >>> import json
        >>> with otp.profile(with_stack=True, frames=otp.FrameFilter(include=["json"])) as prof:
        ...     text = json.dumps([1])
        >>> next(event.function for event in prof.events() if event.function).qualified_name
        'json.dumps'
    """

    qualified_name: str
    """``package.module.Class.method``; before Python 3.11 without the enclosing class or function."""
    path: str
    """Source file as it was compiled: ``co_filename``."""
    line: int
    """First line of the function, from 1; with decorators, the line of the first one."""


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor at the time it was inspected; its values are never read. Immutable.

    Examples:
        >>> with otp.profile(with_stack=True) as prof:
        ...     y = torch.nn.Linear(2, 1)(torch.ones(3, 2))
        >>> weight = prof.modules[0].parameters[0].tensor
        >>> weight.shape, weight.dtype, weight.device
        ((1, 2), 'torch.float32', 'cpu')
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; empty if the layout has none."""
    dtype: str
    """``torch.float32``: torch's own text, as for ``layout`` and ``device``."""
    layout: str
    """``torch.strided``."""
    device: str
    """``cpu``, ``cuda:0``."""
    storage_data_ptr: int
    """Address of the start of its storage, which other tensors may share; 0 without a storage."""
    impl_ptr: int
    """Address of the tensor itself: two names of one tensor have the same one during its lifetime."""


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of a module or of an optimizer. Immutable.

    Examples:
        >>> with otp.profile(with_stack=True) as prof:
        ...     y = torch.nn.Linear(2, 1)(torch.ones(3, 2))
        >>> [parameter.name for parameter in prof.modules[0].parameters]
        ['weight', 'bias']
    """

    name: str
    """In a module: the attribute, ``weight``. In an optimizer: the name that the program passed, else the full name
    in the root module, ``encoder.layers.2.linear1.weight``; empty if no called module has the parameter."""
    type: str
    """Its class: ``torch.nn.parameter.Parameter``."""
    requires_grad: bool
    tensor: TensorInfo | None
    """None for classes other than ``torch.Tensor`` and ``torch.nn.Parameter``, whose attributes may run code of the
    program."""
    gradient: TensorInfo | None
    """The gradient at the first call, else at the end of the recording; None if there was none at either time."""
    state: Mapping[str, TensorInfo] = field(default_factory=dict, hash=False)
    """The optimizer's state of the parameter, such as ``exp_avg``; empty for a parameter of a module."""
    has_late_gradient: bool = False
    """Whether ``gradient`` was read at the end of the recording."""
    late_state: frozenset[str] = frozenset()
    """Names in ``state`` that did not exist at the first call."""


@dataclass(frozen=True)
class ModuleInfo:
    """A ``torch.nn.Module`` that was called; ``prof.modules`` lists them with ``with_stack``. Immutable.

    Examples:
        >>> with otp.profile(with_stack=True) as prof:
        ...     y = torch.nn.Sequential(torch.nn.Linear(2, 1))(torch.ones(3, 2))
        >>> [(module.qualified_name, module.class_name) for module in prof.modules][1]
        ('0', 'torch.nn.modules.linear.Linear')
    """

    qualified_name: str
    """Its path in the root module, ``encoder.layers.2.linear1``; for the root itself, the name of its class."""
    root: str
    """``qualified_name`` of its root: the enclosing module that was called first."""
    class_name: str
    """Its class with the Python module: ``torch.nn.modules.linear.Linear``."""
    parameters: tuple[ParameterInfo, ...]
    """Its own parameters, without those of child modules and without those that are None."""
    self_ptr: int = 0
    """Address of the object, ``id()``, during its lifetime."""
    cls_ptr: int = 0
    """Address of its class, likewise."""


@dataclass(frozen=True)
class ParameterGroupInfo:
    """A parameter group of an optimizer. Immutable.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> with otp.profile(with_stack=True) as prof:
        ...     optimizer.step()
        >>> prof.optimizers[0].groups[0].hyperparameters["lr"]
        0.1
    """

    hyperparameters: Mapping[str, Scalar | tuple[Scalar, ...]] = field(hash=False)
    """Hyperparameters at the first step that are numbers, texts, booleans or None, or tuples of these."""
    parameters: tuple[ParameterInfo, ...]


@dataclass(frozen=True)
class OptimizerInfo:
    """A ``torch.optim.Optimizer`` that made a step; ``prof.optimizers`` lists them with ``with_stack``. Immutable.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> with otp.profile(with_stack=True) as prof:
        ...     optimizer.step()
        >>> prof.optimizers[0].class_name
        'torch.optim.sgd.SGD'
    """

    class_name: str
    """Its class with the Python module: ``torch.optim.adam.Adam``."""
    groups: tuple[ParameterGroupInfo, ...]
    self_ptr: int = 0
    """Address of the object, ``id()``, during its lifetime."""


class LazyInfo(Mapping[int, InfoField], Generic[InfoField]):
    """Info objects by number, each made from its recorded notes when it is first read.

    Most are never read, and making all would be half the cost of stopping a recording. Immutable, so threads may share
    it.
    """

    __slots__ = ("_made", "_make", "_noted")

    def __init__(self, noted: Mapping[int, Any], make: Callable[[Any], InfoField]) -> None:
        self._noted = noted
        self._make = make
        self._made: dict[int, InfoField] = {}

    def __getitem__(self, number: int) -> InfoField:
        info = self._made.get(number)
        # setdefault: two threads that read at the same time get the same object
        return self._made.setdefault(number, self._make(self._noted[number])) if info is None else info

    def __iter__(self) -> Iterator[int]:
        return iter(self._noted)

    def __len__(self) -> int:
        return len(self._noted)

    def __contains__(self, number: object) -> bool:
        return number in self._noted

    def __repr__(self) -> str:
        return f"<{len(self)} facts>"

    def chosen(self, numbers: Container[int]) -> LazyInfo[InfoField]:
        """Returns the entries of these numbers."""
        return LazyInfo({number: noted for number, noted in self._noted.items() if number in numbers}, self._make)


@dataclass(frozen=True, eq=False)
class FrameInfo:
    """Info about the Python calls of a batch. Immutable.

    In a batch of several recordings a number may mean a different module or optimizer in each of them: :meth:`at`
    returns the info of one recording, in which a number has one meaning.
    """

    functions: Mapping[int, FunctionInfo] = field(default_factory=dict)
    """By the name of a call: an index into ``Batch.names``."""
    modules: Mapping[int, ModuleInfo] = field(default_factory=dict)
    """By the name of a call, too. Two classes of one name share the names of their modules; the one called last
    counts."""
    optimizers: Mapping[int, OptimizerInfo] = field(default_factory=dict)
    """By ``fwd_thread`` of the call of an optimizer's step."""
    since: int = 0
    """Start of the recording, Unix ns."""
    recordings: tuple[FrameInfo, ...] = ()
    """Info of each recording, by start; empty if there is only one."""

    @classmethod
    def joined(cls, info: Sequence[FrameInfo]) -> FrameInfo | None:
        """Joins the info of several recordings of one process that do not overlap in time; None for none.

        If a number has a meaning in several recordings, ``modules`` and ``optimizers`` have that of the last one.
        """
        if len(info) <= 1:
            return info[0] if info else None
        recordings = sorted(
            (part for whole in info for part in whole.recordings or (whole,)), key=lambda part: part.since
        )

        def latest_first(which: str) -> ChainMap[int, Any]:
            return ChainMap(*(getattr(part, which) for part in reversed(recordings)))

        functions, modules, optimizers = (latest_first(which) for which in ("functions", "modules", "optimizers"))
        return cls(functions, modules, optimizers, recordings[0].since, tuple(recordings))

    def at(self, time: int) -> FrameInfo:
        """Returns the info that applies to a call that began at ``time``, Unix ns."""
        if not self.recordings:
            return self
        return self.recordings[max(bisect_right(self.recordings, time, key=lambda part: part.since) - 1, 0)]

    def chosen(self, names: Container[int], optimizers: Container[int]) -> FrameInfo:
        """Returns the info of one recording for these names and these numbers of optimizers."""

        def some(info: Mapping[int, InfoField], numbers: Container[int]) -> Mapping[int, InfoField]:
            if isinstance(info, LazyInfo):
                return info.chosen(numbers)
            return {number: info_field for number, info_field in info.items() if number in numbers}

        chosen = some(self.functions, names), some(self.modules, names), some(self.optimizers, optimizers)
        return FrameInfo(*chosen, since=self.since)

    def all_modules(self) -> tuple[ModuleInfo, ...]:
        """Returns every module, by first call; a module of several recordings as it was in the first of them."""
        return self._all("modules", _which_module)

    def all_optimizers(self) -> tuple[OptimizerInfo, ...]:
        """Returns every optimizer, by first step; an optimizer of several recordings as it was in the first of them."""
        return self._all("optimizers", _which_optimizer)

    def _all(self, kind: str, which: Callable[[Any], object]) -> tuple[Any, ...]:
        if not self.recordings:
            return tuple(getattr(self, kind).values())
        all_info: list[Any] = []
        known: set[object] = set()
        for part in self.recordings:
            info = [(which(info_field), info_field) for info_field in getattr(part, kind).values()]
            all_info += [info_field for key, info_field in info if key not in known]
            known.update(key for key, _ in info)
        return tuple(all_info)


def _which_module(info: ModuleInfo) -> object:
    """Key that is equal for one module in two recordings, whose gradients differ."""
    parameters = tuple((p.name, p.tensor) for p in info.parameters)
    return info.qualified_name, info.root, info.class_name, parameters


def _which_optimizer(info: OptimizerInfo) -> object:
    """Key that is equal for one optimizer in two recordings, whose gradients, state and hyperparameters differ."""
    return info.class_name, tuple(tuple(p.tensor or p.name for p in group.parameters) for group in info.groups)
