"""``kineto_results.events()``: the recorded events in order, in the form of torch's ``_KinetoEvent``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from otel_torchprof._columns.schema import Flag, Kind, Scope
from otel_torchprof._tree import inputs

if TYPE_CHECKING:
    from .recorded_nodes import Node

_CUDA_TYPES, _PRIVATE_USE = (1, 6), 20
"""``c10::DeviceType`` whose times torch tells under one name."""


class KinetoEvent:
    """An event with the methods of torch's ``_KinetoEvent``. Immutable.

    No event stands for a kernel: a timed operator has the device time of the work that it launched.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"<{self.activity_type()} {self.name()!r}, {self.duration_ns()} ns>"

    def _column(self, column: str, of_memory: Any) -> Any:
        return of_memory if self._node.is_memory else self._node.value(column)

    def _inputs(self, read: Any, nothing: Any) -> Any:
        return nothing if self._node.is_memory else read(self._node.nodes.batch, self._node.row)

    def _flow(self) -> tuple[int, bool]:
        return self._node.nodes.flows.get(self._node.row, (0, False))

    def name(self) -> str:
        """Returns the recorded name; ``[memory]`` for an allocation or release."""
        return self._node.name

    def activity_type(self) -> str:
        """``cpu_op``, ``user_annotation``, ``python_function`` or ``cpu_instant_event``."""
        if self._node.is_memory:
            return "cpu_instant_event"
        if self.is_python_function():
            return "python_function"
        return "user_annotation" if self.is_user_annotation() else "cpu_op"

    def start_ns(self) -> int:
        """Unix time."""
        return self._node.start

    def end_ns(self) -> int:
        """Unix time."""
        return self._node.end

    def duration_ns(self) -> int:
        """Its end minus its start."""
        return self._node.end - self._node.start

    def device_type(self) -> Any:
        """Returns the device of an allocation or release; the CPU for other events."""
        import torch

        return torch.autograd.DeviceType(self._node.value("device_type") if self._node.is_memory else 0)

    def device_index(self) -> int:
        """Returns the device index of an allocation or release; the process for other events."""
        index: int = max(self._node.value("device_index"), 0) if self._node.is_memory else os.getpid()
        return index

    def device_resource_id(self) -> int:
        """The system's number of its thread."""
        return self._node.thread("thread").os_tid

    def start_thread_id(self) -> int:
        """Torch's number of the thread that it began on."""
        return self._node.thread("thread").number

    def end_thread_id(self) -> int:
        """Torch's number of the thread that it ended on."""
        return self._node.thread("thread" if self._node.is_memory else "end_thread").number

    def is_async(self) -> bool:
        """Whether it ended on another thread."""
        return bool(self._column("flags", 0) & Flag.ASYNC)

    def correlation_id(self) -> int:
        """Returns the number of the operator or label in the profile, from 1; 0 for other events."""
        return int(self._node.nodes.correlation[self._node.position])

    def linked_correlation_id(self) -> int:
        """Returns 0: there are no kernels of other events."""
        return 0

    def external_id(self) -> int:
        """The same as ``correlation_id``."""
        return int(self._node.nodes.correlation[self._node.position])

    def sequence_nr(self) -> int:
        """Torch's number of the autograd node; -1 for none."""
        return self._node.sequence_nr

    def fwd_thread_id(self) -> int:
        """Torch's number of the thread of the forward operator; 0 for none."""
        return self._node.forward_thread

    def scope(self) -> int:
        """The number of torch's ``RecordScope``."""
        number: int = self._column("scope", 0)
        return number

    def is_user_annotation(self) -> bool:
        """Whether it is a label."""
        return self.scope() == Scope.USER_SCOPE

    def is_hidden_event(self) -> bool:
        """False: there are none."""
        return False

    def is_python_function(self) -> bool:
        """Whether it is a call of a Python or C function."""
        return bool(self._column("kind", 0) == Kind.FRAME)

    def python_id(self) -> int:
        """Torch's number of a call; -1 of what is none."""
        return self._node.python_id("own")

    def python_parent_id(self) -> int:
        """Returns torch's number of the enclosing call."""
        return self._node.python_id("caller")

    def python_module_id(self) -> int:
        """Of a call of a module, which one of its class; -1 of what is none."""
        return self._node.python_id("module")

    def overload_name(self) -> str:
        """Of an operator, where overloads were recorded."""
        return str(self._inputs(inputs.overload_name, ""))

    def shapes(self) -> list[list[int]]:
        """Per input its dimensions."""
        return self._inputs(inputs.input_shapes, [])  # type: ignore[no-any-return]  # what it reads

    def structured_input_shapes(self) -> list[Any]:
        """The same with lists of tensors as lists."""
        return self._inputs(inputs.structured_input_shapes, [])  # type: ignore[no-any-return]  # what it reads

    def structured_input_strides(self) -> list[Any]:
        """Per input its strides."""
        return self._inputs(inputs.structured_input_strides, [])  # type: ignore[no-any-return]  # what it reads

    def dtypes(self) -> list[str]:
        """Per input its type."""
        return self._inputs(inputs.input_dtypes, [])  # type: ignore[no-any-return]  # what it reads

    def concrete_inputs(self) -> list[Any]:
        """Per input its value, of scalars and lists of them."""
        return self._inputs(inputs.concrete_inputs, [])  # type: ignore[no-any-return]  # what it reads

    def kwinputs(self) -> dict[str, Any]:
        """Values by keyword."""
        return self._inputs(inputs.kwinputs, {})  # type: ignore[no-any-return]  # what it reads

    def stack(self) -> list[str]:
        """Of an operator or label, the calls around it, innermost first."""
        if self._node.tag != "TorchOp":
            return []
        return [node.name for node in self._node.around() if node.tag in {"PyCall", "PyCCall"}]

    def nbytes(self) -> int:
        """Returns the size of an allocation in bytes, negative for a release; 0 for other events."""
        size: int = self._node.value("bytes") if self._node.is_memory else 0
        return size

    def flops(self) -> int:
        """What the operator computes by its inputs; 0 where that is not known or was not asked for."""
        return 0 if self._node.is_memory else int(self._node.nodes.flops[self._node.row])

    def cuda_elapsed_us(self) -> int:
        """Returns the GPU time in microseconds; -1 if it was not timed."""
        return self._node.device_us(_CUDA_TYPES)

    def privateuse1_elapsed_us(self) -> int:
        """Returns the time of a private backend's device in microseconds; -1 if it was not timed."""
        return self._node.device_us((_PRIVATE_USE,))

    def flow_id(self) -> int:
        """Number of the arrow from a forward operator to its backward function; 0 for none."""
        return self._flow()[0]

    def flow_type(self) -> int:
        """1 at an end of an arrow; else 0."""
        return int(self._flow()[0] > 0)

    def flow_start(self) -> bool:
        """Whether the arrow begins here."""
        return self._flow()[1]

    def metadata_json(self) -> str:
        """Empty: there is none."""
        return ""

    def extra_meta(self) -> dict[str, str]:
        """Empty: there is none."""
        return {}

    def typed_metadata(self) -> dict[str, Any]:
        """Empty: there is none."""
        return {}
