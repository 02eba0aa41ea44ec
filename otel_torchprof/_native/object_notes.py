"""Notes of the functions, modules and optimizers that the tracer of Python's calls sees, and of their tensors, taken at the first call."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.frame_info import (
    FrameInfo,
    FunctionInfo,
    LazyInfo,
    ModuleInfo,
    OptimizerInfo,
    ParameterGroupInfo,
    ParameterInfo,
    TensorInfo,
)
from otel_torchprof._process import threads

from .module_names import ModuleNames, held, held_items

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType

    from .module_names import Table

Note = tuple[Any, ...]
"""The attributes of a tensor in :data:`_NOTED`, its strides, and the address of its storage. Keeps no tensor alive."""
_NOTED = attrgetter("_cdata", "shape", "dtype", "layout", "device")


class ParameterNote(NamedTuple):
    """Note of a parameter."""

    name: str
    type: str
    requires_grad: bool
    tensor: Note | None
    gradient: Note | None
    state: Mapping[str, Note] = {}
    has_late_gradient: bool = False
    """Whether only a later note has the gradient."""
    late_state: frozenset[str] = frozenset()
    """Keys of the state that only a later note has."""

    def completed(self, later: ParameterNote) -> ParameterNote:
        """Returns this note with missing parts taken from a later one; unchanged if that is of another tensor."""
        if self.tensor is not None and (later.tensor is None or later.tensor[0][0] != self.tensor[0][0]):
            return self
        return self._replace(
            name=self.name or later.name,
            tensor=self.tensor or later.tensor,
            gradient=self.gradient or later.gradient,
            has_late_gradient=self.has_late_gradient or (self.gradient is None and later.gradient is not None),
            state={**later.state, **self.state},
            late_state=self.late_state | (later.state.keys() - self.state.keys()),
        )

    def info(self) -> ParameterInfo:
        """Converts the note to public data."""
        state = {key: info_field for key, note in self.state.items() if (info_field := _tensor_info(note)) is not None}
        tensor, gradient = _tensor_info(self.tensor), _tensor_info(self.gradient)
        late = self.has_late_gradient, self.late_state
        return ParameterInfo(self.name, self.type, self.requires_grad, tensor, gradient, state, *late)


class TensorNotes:
    """Takes notes of tensors; torch must be imported. Costs about half a microsecond per tensor. Thread-safe.

    Only of ``torch.Tensor`` and ``torch.nn.Parameter`` themselves: their subclasses may run code of their own. Every use must be
    inside :attr:`without_modes`, since the program's torch function modes would be called for each attribute.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        native = torch._C  # noqa: SLF001 - there is no public API
        self._plain = {kind: class_name(kind) for kind in (torch.nn.Parameter, torch.Tensor)}
        self._strided = torch.strided
        self._requires_grad = native.TensorBase.requires_grad.__get__
        self._is_tracing: Callable[[], bool] = native._is_tracing  # noqa: SLF001 - there is no public API
        self._address: Callable[[Any], int] = getattr(native, "_data_address", _address)
        self.without_modes: Callable[[], Any] = native.DisableTorchFunction

    def note_of(self, tensor: Any) -> Note | None:
        """Returns the note of a tensor; None for another class, or if it has no shape."""
        if type(tensor) not in self._plain:
            return None
        try:
            return _NOTED(tensor), tensor.stride(), self._address(tensor)
        except Exception:  # noqa: BLE001 - it has no strides, no storage or no shape
            return self._of_odd(tensor)

    def _of_odd(self, tensor: Any) -> Note | None:
        """Returns the note of a sparse tensor, which has no strides and no storage, or of one in ``torch.vmap``; None for a nested one."""
        try:
            return _NOTED(tensor), tensor.stride() if tensor.layout is self._strided else (), 0
        except Exception:  # noqa: BLE001 - must not fail in the program
            return None

    def of_parameter(self, name: str, parameter: Any, state: Any = None) -> ParameterNote:
        """Returns the note of a parameter with its gradient; ``state``: its optimizer state by name."""
        kind = self._plain.get(type(parameter))
        # While torch.jit.trace runs, reading a shape adds operators to the traced graph.
        if kind is None or self._is_tracing():
            return ParameterNote(name, class_name(type(parameter)), self._requires_gradient(parameter), None, None)
        # Torch warns if a gradient is read that is not retained.
        kept = parameter.is_leaf or parameter.retains_grad
        gradient = self.note_of(parameter.grad) if kept else None
        note = ParameterNote(name, kind, parameter.requires_grad, self.note_of(parameter), gradient)
        return note._replace(state=self._of_state(state)) if isinstance(state, dict) else note

    def _of_state(self, state: dict[Any, Any]) -> dict[str, Note]:
        return {
            key: note for key, value in list(dict.items(state)) if type(key) is str and (note := self.note_of(value))
        }

    def _requires_gradient(self, parameter: Any) -> bool:
        try:
            return bool(self._requires_grad(parameter))
        except Exception:  # noqa: BLE001 - it is no tensor
            return False


def class_name(kind: type) -> str:
    """Returns the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _address(tensor: Any) -> int:
    """Returns the address of the storage, for versions of torch without a function for it."""
    first: int = tensor.data_ptr()
    return first and first - tensor.storage_offset() * tensor.element_size()


def _tensor_info(note: Note | None) -> TensorInfo | None:
    if note is None:
        return None
    (itself, shape, dtype, layout, device), strides, data = note
    return TensorInfo(tuple(shape), tuple(strides), str(dtype), str(layout), str(device), data, itself)


_PLAIN = {int, float, bool, str, type(None)}


class _ModuleNote(NamedTuple):
    name: str
    root: str
    type: str
    parameters: tuple[ParameterNote, ...]
    pointers: tuple[int, int]

    def info(self) -> ModuleInfo:
        parameters = tuple(note.info() for note in self.parameters)
        return ModuleInfo(self.name, self.root, self.type, parameters, *self.pointers)


class _GroupNote(NamedTuple):
    hyperparameters: dict[str, Any]
    parameters: tuple[ParameterNote, ...]

    def completed(self, later: _GroupNote) -> _GroupNote:
        return self._replace(parameters=_completed(self.parameters, later.parameters))


class _OptimizerNote(NamedTuple):
    type: str
    groups: tuple[_GroupNote, ...]
    pointer: int

    def info(self) -> OptimizerInfo:
        groups = (
            ParameterGroupInfo(g.hyperparameters, tuple(note.info() for note in g.parameters)) for g in self.groups
        )
        return OptimizerInfo(self.type, tuple(groups), self.pointer)


def _completed(first: tuple[Any, ...], later: tuple[Any, ...]) -> tuple[Any, ...]:
    """Completes notes of the same objects from a later list, which may have more of them at its end."""
    both = zip(first, later, strict=False)
    return (*(a.completed(b) for a, b in both), *first[len(later) :], *later[len(first) :])


class _NotedObject:
    """A weak reference to an object, and its note, which is replaced as a whole, never changed."""

    __slots__ = ("note", "reference", "thread")

    def __init__(self, noted: Any, note: Any) -> None:
        self.reference = weakref.ref(noted)
        self.note = note
        self.thread = threads.get_ident()


def _complete(entry: _NotedObject, completed: Callable[[Any, Any], Any]) -> None:
    noted = entry.reference()
    # Not objects of other threads: a backward pass there may replace gradients without the GIL, and torch crashes if one is read
    # meanwhile.
    if noted is not None and entry.thread == threads.get_ident():
        # If the program has changed the object so that this fails, the first note remains.
        with suppress(Exception):
            entry.note = completed(noted, entry.note)


class ObjectNotes:
    """Notes of the objects that the tracer sees for the first time.

    Keeps no module, optimizer or tensor alive, and code objects only until they are read. Thread-safe, in the middle of the program's
    step: runs no operator and no code of the program, does not block, and leaves out objects that cannot be noted. Costs well
    under a microsecond per function, some per module, and about one per parameter.
    """

    def __init__(self) -> None:
        self._codes: deque[tuple[int, CodeType, str | None]] = deque()
        self.add_code: Callable[[tuple[int, CodeType, str | None]], None] = self._codes.append
        """Called with (id of its name, its code, ``__name__`` of its module) at the first call of a function.

        Not a Python function: a signal handler could run in it, and its exceptions would be lost.
        """
        self._functions: dict[int, tuple[str | None, str, str, int]] = {}
        self._modules: dict[int, _NotedObject] = {}
        self._optimizers: dict[int, _NotedObject] = {}
        self._names = ModuleNames()
        self._latest: Table | None = None
        self._tensors: TensorNotes | None = None

    def add_module(self, name_id: int, module: Any) -> None:
        """Notes a called module, after the modules that enclose the call. Replaces another module with that name."""
        with suppress(Exception):  # a module unlike torch's; must not fail in the program
            self._modules[name_id] = _NotedObject(module, self._note_of_module(module))

    def add_optimizer(self, identity: int, optimizer: Any) -> None:
        """Notes an optimizer that makes a step. Replaces another one with that number."""
        with suppress(Exception):  # an optimizer unlike torch's; must not fail in the program
            self._optimizers[identity] = _NotedObject(optimizer, self._note_of_optimizer(optimizer))

    def finish(self) -> FrameInfo:
        """Returns the notes at the end of a recording, completed from the living objects that this thread called.

        Other recordings may continue with the same notes. Costs about a microsecond per function, and per parameter without a gradient.
        """
        for entry in list(self._modules.values()):
            _complete(entry, self._completed_module)
        for entry in list(self._optimizers.values()):
            _complete(entry, self._completed_optimizer)
        return self.info()

    def info(self) -> FrameInfo:
        """Returns the notes so far as plain data."""
        with suppress(IndexError):  # empty, or another thread took the last one
            while True:
                self._note_function(*self._codes.popleft())
        # Atomic copies: a list of items creates tuples, so garbage may be collected, and finalizers may call a module.
        modules = {number: entry.note for number, entry in self._modules.copy().items()}
        optimizers = {number: entry.note for number, entry in self._optimizers.copy().items()}
        return FrameInfo(
            LazyInfo(dict(self._functions), _function_info),
            LazyInfo(modules, _ModuleNote.info),
            LazyInfo(optimizers, _OptimizerNote.info),
        )

    def _note_function(self, name_id: int, code: CodeType, module_name: str | None) -> None:
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        self._functions.setdefault(name_id, (module_name, name, code.co_filename, code.co_firstlineno))

    def _note_of_module(self, module: Any) -> _ModuleNote:
        self._latest = table = self._names.find(module, self._latest)
        name = table[id(module)]
        # A tuple has the name, and the wrapper that is called instead of the module.
        full_name = name if isinstance(name, str) else name[0]
        kind = type(module)
        pointers = id(module), id(kind)
        return _ModuleNote(full_name, table.root_name, class_name(kind), self._parameters_of(module), pointers)

    def _parameters_of(self, module: Any) -> tuple[ParameterNote, ...]:
        parameters = held_items(module, "_parameters")
        if not parameters:
            return ()
        tensors = self._tensor_notes()
        with tensors.without_modes():
            return tuple([tensors.of_parameter(name, parameter) for name, parameter in parameters])

    def _completed_module(self, module: Any, before: _ModuleNote) -> _ModuleNote:
        if all(note.gradient is not None for note in before.parameters):
            return before
        later = {note.name: note for note in self._parameters_of(module)}
        completed = (note.completed(later.get(note.name, note)) for note in before.parameters)
        return before._replace(parameters=tuple(completed))

    def _note_of_optimizer(self, optimizer: Any) -> _OptimizerNote:
        # By id: a lookup by tensor would call its ``__hash__``.
        state = {id(parameter): values for parameter, values in dict.copy(held(optimizer, "state")).items()}
        names = self._names_of_parameters()
        tensors = self._tensor_notes()
        with tensors.without_modes():
            groups = [_note_of_group(group, state, names, tensors) for group in held(optimizer, "param_groups")]
        return _OptimizerNote(class_name(type(optimizer)), tuple(groups), id(optimizer))

    def _completed_optimizer(self, optimizer: Any, before: _OptimizerNote) -> _OptimizerNote:
        notes = [note for group in before.groups for note in group.parameters]
        if any(note.state for note in notes) and all(note.gradient is not None for note in notes):
            return before
        return before._replace(groups=_completed(before.groups, self._note_of_optimizer(optimizer).groups))

    def _names_of_parameters(self) -> dict[int, str]:
        """Returns full names of the parameters of living modules, by id."""
        names: dict[int, str] = {}
        for entry in list(self._modules.values()):
            module = entry.reference()
            if module is not None:
                path = "" if entry.note.name == entry.note.root else f"{entry.note.name}."
                for key, parameter in held_items(module, "_parameters"):
                    names.setdefault(id(parameter), path + key)
        return names

    def _tensor_notes(self) -> TensorNotes:
        if self._tensors is None:
            self._tensors = TensorNotes()
        return self._tensors


def _note_of_group(
    group: dict[str, Any], state: dict[int, Any], names: dict[int, str], tensors: TensorNotes
) -> _GroupNote:
    parameters = group["params"]
    # Names that the program passed to the optimizer, possible since torch 2.6.
    parameter_names = group.get("param_names") or [names.get(id(parameter), "") for parameter in parameters]
    notes = [
        tensors.of_parameter(name, parameter, state.get(id(parameter)))
        for name, parameter in zip(parameter_names, parameters, strict=True)
    ]
    hyperparameters = {
        key: value for key, value in group.copy().items() if key not in {"params", "param_names"} and _is_plain(value)
    }
    return _GroupNote(hyperparameters, tuple(notes))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(type(item) in _PLAIN for item in value))


def _function_info(noted: tuple[str | None, str, str, int]) -> FunctionInfo:
    module_name, name, path, line = noted
    return FunctionInfo(f"{module_name}.{name}" if module_name else name, path, line)
