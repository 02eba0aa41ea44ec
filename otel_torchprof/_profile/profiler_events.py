"""The tree of all recorded events, in the form of torch's ``kineto_results.experimental_event_tree()``.

Objects have the names and fields of torch's (``torch/_C/_profiler.pyi``). Torch's classes cannot be instantiated; the objects
report them as their ``__class__``, so that ``torch.profiler._memory_profiler``, ``_pattern_matcher`` and ``_utils`` accept them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.cached import cached_property
from otel_torchprof._model.devices import device_name
from otel_torchprof._model.frames import CALL, MODULE_PREFIX
from otel_torchprof._model.inputs import Input, InputKind, decoded, overload_name
from otel_torchprof._model.recorded_tree import NO_ID, TensorId, called
from otel_torchprof._process import threads

from .recorded_events import Node

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
    """A property for ``__class__`` that returns torch's class of that name, so that ``isinstance`` is true."""
    return property(lambda _: getattr(_torchs(), name))


class EventTree:
    """The events of a tree, each created once, on first access. Thread-safe."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threads.Lock()
        self._made: dict[int, ProfilerEvent] = {}

    def event(self, position: int) -> ProfilerEvent:
        """The event at a position in the tree."""
        with self._lock:
            return self._made.get(position) or self._made.setdefault(
                position, ProfilerEvent(self, Node(self._nodes, position))
            )

    def children(self, position: int) -> list[ProfilerEvent]:
        """The children of the event at a position, by start; for -1, the top-level events."""
        return [self.event(child) for child in self._nodes.children(position)]


class ProfilerEvent:
    """``_ProfilerEvent``: a recorded event. Immutable."""

    __class__ = _as_torchs("_ProfilerEvent")

    def __init__(self, tree: EventTree, node: Node) -> None:
        self._tree, self._node = tree, node

    def __repr__(self) -> str:
        return f"<{self._node.tag} {self.name!r}, {self.duration_time_ns} ns>"

    @property
    def tag(self) -> Any:
        """Torch's ``_EventType``."""
        return getattr(_torchs()._EventType, self._node.tag)  # noqa: SLF001 - torch's name

    @property
    def name(self) -> str:
        """Recorded name; ``[memory]`` for an allocation or release."""
        return self._node.name

    @property
    def overload_name(self) -> str:
        """Overload of an operator, if overloads were recorded; else empty."""
        return "" if self._node.is_memory else overload_name(self._node.nodes.batch, self._node.row)

    @property
    def id(self) -> int:
        """Unique number of the event in its profile."""
        return self._node.position + 1

    @property
    def correlation_id(self) -> int:
        """Number of the operator or label in the profile, from 1; 0 for other events."""
        number: int = self._node.nodes.correlation.item(self._node.position)
        return number

    @property
    def parent(self) -> ProfilerEvent | None:
        """The event that encloses it; None for a top-level event."""
        return None if self._node.parent < 0 else self._tree.event(self._node.parent)

    @cached_property
    def children(self) -> list[ProfilerEvent]:
        """Its children, by start."""
        return self._tree.children(self._node.position)

    @property
    def start_tid(self) -> int:
        """Torch's id of its thread; the system's id if torch never ran there."""
        return self._node.thread("thread").number

    @property
    def start_time_ns(self) -> int:
        """Start, Unix ns."""
        return self._node.start

    @property
    def end_time_ns(self) -> int:
        """End, Unix ns; equal to the start for a change of memory."""
        return self._node.end

    @property
    def duration_time_ns(self) -> int:
        """End minus start."""
        return self.end_time_ns - self.start_time_ns

    @cached_property
    def extra_fields(self) -> Any:
        """Fields that only its type of event has."""
        return _FIELDS[self._node.tag](self._node)

    @property
    def typed(self) -> tuple[Any, Any]:
        """``tag`` and ``extra_fields``."""
        return self.tag, self.extra_fields


class TensorMetadata:
    """``_TensorMetadata``: a recorded tensor.

    ``device``, ids and addresses are None unless ``record_shapes``, ``profile_memory`` and ``with_stack`` are all on.
    ``impl_ptr`` is known only for parameters, gradients and optimizer state; ``layout`` of an input only if it is strided.
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
        """Torch's setting when this field is first read for any event of the profile: it is not recorded."""
        return self._node.nodes.allow_tf32

    @cached_property
    def inputs(self) -> list[Any]:
        """Tensors, lists of tensors, and scalars; None for other inputs."""
        nodes, row = self._node.nodes, self._node.row
        numbers = iter(range(1 << 32))

        def converted(value: Input) -> Any:
            if value.kind is InputKind.TENSOR:
                return _input_metadata(value, nodes.ids.of_input(row, next(numbers)) if value.storage else NO_ID)
            if value.kind is InputKind.TENSOR_LIST:
                return [converted(element) for element in value.elements]
            return None if value.kind is InputKind.STRING else value.value

        return [converted(value) for value in decoded(nodes.batch, row).inputs]


class AllocationFields:
    """``_ExtraFields_Allocation``: an allocation, or a release if ``alloc_size`` is below 0."""

    __class__ = _as_torchs("_ExtraFields_Allocation")

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ptr: int = node.value("address")
        self.alloc_size: int = node.value("bytes")
        # As in torch, 0 if the allocator does not report it.
        self.total_allocated: int = max(node.value("total_allocated"), 0)
        self.total_reserved: int = max(node.value("total_reserved"), 0)

    @property
    def device(self) -> Any:
        """The ``torch.device`` of the memory."""
        return _device(self._node.value("device_type"), self._node.value("device_index"))

    @property
    def id(self) -> int | None:
        """Number of the tensor in this memory; None if no operator had it as an input."""
        return self._ids.tensor

    @property
    def allocation_id(self) -> int | None:
        """Number of the storage."""
        return self._ids.storage

    @cached_property
    def _ids(self) -> TensorId:
        nodes = self._node.nodes
        return nodes.ids.of_memory(self._node.row - len(nodes.batch))


class OutOfMemoryFields:
    """``_ExtraFields_OutOfMemory``, which has no fields in torch."""

    __class__ = _as_torchs("_ExtraFields_OutOfMemory")

    def __init__(self, node: Node) -> None:
        """Ignores the node."""


class PyFrameState:
    """``_PyFrameState``: a function and its first line. For a caller, torch has the line of the call instead."""

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
        """The calling function; the function itself if its caller was not recorded."""
        return _state(next((node for node in self._node.ancestors() if node.tag == "PyCall"), self._node))


class PyCallFields(PyCCallFields):
    """``_ExtraFields_PyCall``: a call of a Python function, a module or an optimizer's step."""

    __class__ = _as_torchs("_ExtraFields_PyCall")

    @property
    def callsite(self) -> PyFrameState:
        """The function itself."""
        return _state(self._node)

    @cached_property
    def module(self) -> NNModuleInfo | None:
        """The called module, or None."""
        module, _ = called(self._node.nodes.tree, self._node.row, self._node.info)
        return None if module is None else NNModuleInfo(self._node, module)

    @cached_property
    def optimizer(self) -> OptimizerFields | None:
        """The optimizer whose step was called, or None."""
        _, optimizer = called(self._node.nodes.tree, self._node.row, self._node.info)
        return None if optimizer is None else OptimizerFields(self._node, optimizer)


class NNModuleInfo:
    """``_NNModuleInfo``: a module and its parameters at its first call. Only in the first call do they have ids."""

    __class__ = _as_torchs("_NNModuleInfo")

    def __init__(self, node: Node, info: ModuleInfo) -> None:
        self._node, self._info = node, info
        self.self_ptr, self.cls_ptr = info.self_ptr, info.cls_ptr
        self.cls_name = info.class_name.rpartition(".")[2]

    @cached_property
    def parameters(self) -> list[tuple[str, TensorMetadata, TensorMetadata | None]]:
        """Name, tensor and gradient (or None) of each parameter."""
        parameters = _parameters(self._node, self._info, self._info.parameters)
        return [(name, tensor, gradient) for name, tensor, gradient, _ in parameters]


class OptimizerFields:
    """``_OptimizerInfo``: an optimizer and its parameters at its first step. Only in the first step do they have ids."""

    __class__ = _as_torchs("_OptimizerInfo")

    def __init__(self, node: Node, info: OptimizerInfo) -> None:
        self._node, self._info = node, info
        self.self_ptr = info.self_ptr

    @cached_property
    def parameters(self) -> list[tuple[TensorMetadata, TensorMetadata | None, list[tuple[str, TensorMetadata]]]]:
        """Tensor, gradient (or None) and optimizer state, as names and tensors, of each parameter."""
        all_parameters = (parameter for group in self._info.groups for parameter in group.parameters)
        parameters = _parameters(self._node, self._info, all_parameters)
        return [(tensor, gradient, state) for _, tensor, gradient, state in parameters]


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
    """Yields name, tensor, gradient and state of each parameter. As in torch, they have ids in the first call only."""
    ids = node.nodes.ids
    is_first = ids.first_calls.get(id(owner)) == node.position

    def metadata(info: TensorInfo) -> TensorMetadata:
        return _known_metadata(info, ids.of_known.get(id(info), NO_ID) if is_first else NO_ID)

    for parameter in parameters:
        if parameter.tensor is not None:
            gradient = parameter.gradient
            gradient_metadata = None if gradient is None or parameter.has_late_gradient else metadata(gradient)
            state = [
                (name, metadata(tensor)) for name, tensor in parameter.state.items() if name not in parameter.late_state
            ]
            yield parameter.name, metadata(parameter.tensor), gradient_metadata, state


def _known_metadata(info: TensorInfo, ids: TensorId) -> TensorMetadata:
    """Metadata of a parameter, gradient or optimizer state."""
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


def _input_metadata(tensor: Input, ids: TensorId) -> TensorMetadata:
    """Metadata of an input that is a tensor."""
    import torch

    storage = tensor.storage
    name = _DTYPES.get(tensor.type, tensor.type.removeprefix("c10::"))
    return TensorMetadata(
        ids,
        storage_data_ptr=(storage.address or None) if storage else None,
        layout=torch.strided if len(tensor.strides) == len(tensor.shape) else None,
        device=None if storage is None else _device(storage.device_type, storage.device_index),
        dtype=getattr(torch, name, None) or getattr(torch, name.lower(), None),
        sizes=tensor.shape,
        strides=tensor.strides,
    )


def _device(kind: int, index: int) -> Any:
    import torch

    # The CPU has no index.
    return torch.device(device_name(kind), index) if kind and index >= 0 else torch.device(device_name(kind))


def _state(node: Node) -> PyFrameState:
    """The called function, from the name of the call; for a call of a module, the function of torch that calls modules."""
    match = CALL.fullmatch(node.name)
    if match is not None:
        return PyFrameState(match["file"], int(match["line"]), match["function"])
    if not node.name.startswith(MODULE_PREFIX):
        return PyFrameState("", 0, node.name)
    import torch

    code = torch.nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - what __call__ is
    return PyFrameState("torch/nn/modules/module.py", code.co_firstlineno, code.co_name)
