"""The tree of everything that was recorded, in the form of torch's ``kineto_results.experimental_event_tree()``.

Objects have the names and fields of torch's (``torch/_C/_profiler.pyi``) and say that they are of torch's classes, of which
nobody can make any: so ``torch.profiler._memory_profiler``, ``_pattern_matcher`` and ``_utils`` take them for such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._model.devices import device_name
from otel_torchprof._model.frames import MODULE_PREFIX
from otel_torchprof._model.inputs import Input, InputKind, decoded, overload_name
from otel_torchprof._model.recorded_tree import NO_ID, TensorId, called
from otel_torchprof._process import threads

from .recorded_events import CALL, Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from otel_torchprof._columns.frame_info import ModuleInfo, OptimizerInfo, ParameterInfo, TensorInfo

    from .recorded_events import Nodes

_DTYPES = {
    "float": "float32",
    "long int": "int64",
    "int": "int32",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


def _torchs() -> Any:
    import torch

    return torch._C._profiler  # noqa: SLF001 - no other module has these


def _as_torchs(name: str) -> Any:
    """For ``__class__``: torch's class of that name, which ``isinstance`` believes."""
    return property(lambda _: getattr(_torchs(), name))


class EventTree:
    """The events of a tree, each made when it is looked at, once. Thread-safe."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threads.Lock()
        self._made: dict[int, ProfilerEvent] = {}

    def event(self, position: int) -> ProfilerEvent:
        """The one at a position in the tree."""
        with self._lock:
            return self._made.get(position) or self._made.setdefault(
                position, ProfilerEvent(self, Node(self._nodes, position))
            )

    def children(self, position: int) -> list[ProfilerEvent]:
        """Those directly inside another one, by start; of -1 those that nothing is around."""
        return [self.event(child) for child in self._nodes.children(position)]


class ProfilerEvent:
    """``_ProfilerEvent``: something that was recorded, with what is inside of it. Immutable."""

    __class__ = _as_torchs("_ProfilerEvent")

    def __init__(self, tree: EventTree, node: Node) -> None:
        self._tree, self._node = tree, node

    def __repr__(self) -> str:
        return f"<{self._node.tag} {self.name!r}, {self.duration_time_ns} ns>"

    @property
    def tag(self) -> Any:
        """What it is: torch's ``_EventType``."""
        return getattr(_torchs()._EventType, self._node.tag)  # noqa: SLF001 - torch's name

    @property
    def name(self) -> str:
        """As it was recorded; ``[memory]`` where some was allocated or freed."""
        return self._node.name

    @property
    def overload_name(self) -> str:
        """Of an operator, where overloads were recorded."""
        return "" if self._node.is_memory else overload_name(self._node.nodes.batch, self._node.row)

    @property
    def id(self) -> int:
        """Another number for each event of a profile."""
        return self._node.position + 1

    @property
    def correlation_id(self) -> int:
        """Which operator or label of the profile it is, from 1; 0 of all else."""
        number: int = self._node.nodes.correlation.item(self._node.position)
        return number

    @property
    def parent(self) -> ProfilerEvent | None:
        """What was open around it."""
        return None if self._node.parent < 0 else self._tree.event(self._node.parent)

    @cached_property
    def children(self) -> list[ProfilerEvent]:
        """What is directly inside of it, by start."""
        return self._tree.children(self._node.position)

    @property
    def start_tid(self) -> int:
        """Torch's number of its thread, the system's where torch never ran."""
        return self._node.thread("thread").number

    @property
    def start_time_ns(self) -> int:
        """Unix time."""
        return self._node.start

    @property
    def end_time_ns(self) -> int:
        """Unix time; of memory that of its start."""
        return self._node.end

    @property
    def duration_time_ns(self) -> int:
        """End minus start."""
        return self.end_time_ns - self.start_time_ns

    @cached_property
    def extra_fields(self) -> Any:
        """What only events of its kind have."""
        return _FIELDS[self._node.tag](self._node)

    @property
    def typed(self) -> tuple[Any, Any]:
        """``tag`` and ``extra_fields``."""
        return self.tag, self.extra_fields


class TensorMetadata:
    """``_TensorMetadata``: a tensor as it was. Its ``device``, ids and addresses are None where storages were not recorded.

    They are with ``record_shapes``, ``profile_memory`` and ``with_stack`` together. ``impl_ptr`` is known of parameters and
    their like only, ``layout`` of inputs only where it is strided.
    """

    __class__ = _as_torchs("_TensorMetadata")

    def __init__(self, ids: TensorId, **known: Any) -> None:
        self.id, self.allocation_id = ids
        self.impl_ptr: int | None = known.get("impl_ptr")
        self.storage_data_ptr: int | None = known.get("storage_data_ptr")
        self.layout, self.device, self.dtype = known["layout"], known["device"], known["dtype"]
        self.sizes: list[int] = known["sizes"]
        self.strides: list[int] = known["strides"]

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"<tensor {self.id} of {self.dtype}, {self.sizes}>"


class TorchOpFields:
    """``_ExtraFields_TorchOp``: an operator, or a label."""

    __class__ = _as_torchs("_ExtraFields_TorchOp")

    def __init__(self, node: Node) -> None:
        self._node = node
        self.name = node.name
        self.sequence_number = node.sequence_nr
        self.scope = _torchs().RecordScope(node.value("scope"))

    @property
    def allow_tf32_cublas(self) -> bool:
        """As torch has it when that is first read of any event of the profile."""
        return self._node.nodes.allow_tf32

    @cached_property
    def inputs(self) -> list[Any]:
        """Tensors, lists of tensors, and scalars; None for what is neither."""
        nodes, row = self._node.nodes, self._node.row
        numbers = iter(range(1 << 32))

        def of(one: Input) -> Any:
            if one.kind is InputKind.TENSOR:
                return _of_input(one, nodes.ids.of_input(row, next(numbers)) if one.storage else NO_ID)
            if one.kind is InputKind.TENSOR_LIST:
                return [of(element) for element in one.elements]
            return None if one.kind is InputKind.STRING else one.value

        return [of(one) for one in decoded(nodes.batch, row).inputs]


class AllocationFields:
    """``_ExtraFields_Allocation``: memory that was allocated, or freed, where ``alloc_size`` is below 0."""

    __class__ = _as_torchs("_ExtraFields_Allocation")

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ptr: int = node.value("address")
        self.alloc_size: int = node.value("bytes")
        # Torch has 0 where an allocator does not tell.
        self.total_allocated: int = max(node.value("total_allocated"), 0)
        self.total_reserved: int = max(node.value("total_reserved"), 0)

    @property
    def device(self) -> Any:
        """The ``torch.device`` of the memory."""
        return _device(self._node.value("device_type"), self._node.value("device_index"))

    @property
    def id(self) -> int | None:
        """The number of the tensor in it; None where none was seen."""
        return self._ids.tensor

    @property
    def allocation_id(self) -> int | None:
        """The number of the storage."""
        return self._ids.storage

    @cached_property
    def _ids(self) -> TensorId:
        nodes = self._node.nodes
        return nodes.ids.of_memory(self._node.row - len(nodes.batch))


class OutOfMemoryFields:
    """``_ExtraFields_OutOfMemory``, of which torch tells nothing."""

    __class__ = _as_torchs("_ExtraFields_OutOfMemory")

    def __init__(self, node: Node) -> None:
        """Keeps nothing of it."""


class PyFrameState:
    """``_PyFrameState``: a function, and the line that it begins in. Torch has the line of the call in a caller's."""

    __class__ = _as_torchs("_PyFrameState")

    def __init__(self, file_name: str, line_number: int, function_name: str) -> None:
        self.file_name, self.line_number, self.function_name = file_name, line_number, function_name


class PyCCallFields:
    """``_ExtraFields_PyCCall``: a call of a C function."""

    __class__ = _as_torchs("_ExtraFields_PyCCall")

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def caller(self) -> PyFrameState:
        """The function that the call is in; its own where nothing is known of that."""
        return _state(next((node for node in self._node.around() if node.tag == "PyCall"), self._node))


class PyCallFields(PyCCallFields):
    """``_ExtraFields_PyCall``: a call of a function of Python's, of a module, or of an optimizer's step."""

    __class__ = _as_torchs("_ExtraFields_PyCall")

    @property
    def callsite(self) -> PyFrameState:
        """The function itself."""
        return _state(self._node)

    @cached_property
    def module(self) -> NNModuleInfo | None:
        """The module that is called."""
        found, _ = called(self._node.nodes.tree, self._node.row, self._node.info)
        return None if found is None else NNModuleInfo(self._node, found)

    @cached_property
    def optimizer(self) -> OptimizerFields | None:
        """The optimizer whose step it is."""
        _, found = called(self._node.nodes.tree, self._node.row, self._node.info)
        return None if found is None else OptimizerFields(self._node, found)


class NNModuleInfo:
    """``_NNModuleInfo``: a module, with its parameters as they were at its first call; in that they have ids."""

    __class__ = _as_torchs("_NNModuleInfo")

    def __init__(self, node: Node, info: ModuleInfo) -> None:
        self._node, self._info = node, info
        self.self_ptr, self.cls_ptr = info.self_ptr, info.cls_ptr
        self.cls_name = info.class_name.rpartition(".")[2]

    @cached_property
    def parameters(self) -> list[tuple[str, TensorMetadata, TensorMetadata | None]]:
        """Name, parameter and gradient, if there was one."""
        found = _parameters(self._node, self._info, self._info.parameters)
        return [(name, tensor, gradient) for name, tensor, gradient, _ in found]


class OptimizerFields:
    """``_OptimizerInfo``: an optimizer, with its parameters as they were at its first step; in that they have ids."""

    __class__ = _as_torchs("_OptimizerInfo")

    def __init__(self, node: Node, info: OptimizerInfo) -> None:
        self._node, self._info = node, info
        self.self_ptr = info.self_ptr

    @cached_property
    def parameters(self) -> list[tuple[TensorMetadata, TensorMetadata | None, list[tuple[str, TensorMetadata]]]]:
        """Parameter, gradient, if there was one, and what the optimizer keeps of it, by name."""
        all_parameters = (one for group in self._info.groups for one in group.parameters)
        found = _parameters(self._node, self._info, all_parameters)
        return [(tensor, gradient, state) for _, tensor, gradient, state in found]


_FIELDS = {
    "TorchOp": TorchOpFields,
    "Allocation": AllocationFields,
    "OutOfMemory": OutOfMemoryFields,
    "PyCall": PyCallFields,
    "PyCCall": PyCCallFields,
}


def _parameters(
    node: Node, owner: Any, parameters: Iterable[ParameterInfo]
) -> Iterator[tuple[str, Any, Any, list[tuple[str, Any]]]]:
    """Name, tensor, gradient and state of each. As in torch, they have ids in the first call only."""
    ids = node.nodes.ids
    is_first = ids.first_calls.get(id(owner)) == node.position

    def of(info: TensorInfo) -> TensorMetadata:
        return _of_known(info, ids.of_known.get(id(info), NO_ID) if is_first else NO_ID)

    for one in parameters:
        if one.tensor is not None:
            gradient = None if one.gradient is None or one.has_late_gradient else of(one.gradient)
            state = [(name, of(kept)) for name, kept in one.state.items() if name not in one.late_state]
            yield one.name, of(one.tensor), gradient, state


def _of_known(info: TensorInfo, ids: TensorId) -> TensorMetadata:
    import torch

    return TensorMetadata(
        ids,
        impl_ptr=info.impl_ptr,
        storage_data_ptr=info.storage_data_ptr or None,
        layout=getattr(torch, info.layout.removeprefix("torch."), None),
        device=torch.device(info.device),
        dtype=getattr(torch, info.dtype.removeprefix("torch."), None),
        sizes=list(info.shape),
        strides=list(info.strides),
    )


def _of_input(one: Input, ids: TensorId) -> TensorMetadata:
    import torch

    where = one.storage
    name = _DTYPES.get(one.type, one.type.removeprefix("c10::"))
    return TensorMetadata(
        ids,
        storage_data_ptr=(where.address or None) if where else None,
        layout=torch.strided if len(one.strides) == len(one.shape) else None,
        device=None if where is None else _device(where.device_type, where.device_index),
        dtype=getattr(torch, name, None) or getattr(torch, name.lower(), None),
        sizes=one.shape,
        strides=one.strides,
    )


def _device(kind: int, index: int) -> Any:
    import torch

    # The CPU has no index.
    return torch.device(device_name(kind), index) if kind and index >= 0 else torch.device(device_name(kind))


def _state(node: Node) -> PyFrameState:
    """The function that a call is of, as its name tells it; of a module's, the one that calls modules."""
    matched = CALL.fullmatch(node.name)
    if matched is not None:
        return PyFrameState(matched["file"], int(matched["line"]), matched["function"])
    if not node.name.startswith(MODULE_PREFIX):
        return PyFrameState("", 0, node.name)
    import torch

    code = torch.nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - what __call__ is
    return PyFrameState("torch/nn/modules/module.py", code.co_firstlineno, code.co_name)
