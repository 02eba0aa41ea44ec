"""What the tracer of Python's calls meets, noted at first sight: functions, modules, optimizers, and tensors of these."""

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
"""What :data:`_SEEN` gets, strides, and the address of the storage, as torch has them: nothing that keeps a tensor alive."""
_SEEN = attrgetter("_cdata", "shape", "dtype", "layout", "device")


class ParameterNote(NamedTuple):
    """What was noted of a parameter."""

    name: str
    type: str
    requires_grad: bool
    tensor: Note | None
    gradient: Note | None
    state: Mapping[str, Note] = {}
    has_late_gradient: bool = False
    """Whether only a later look has found the gradient."""
    late_state: frozenset[str] = frozenset()
    """What of the state only a later look has found."""

    def completed(self, later: ParameterNote) -> ParameterNote:
        """With what a later look has found and this one had not; as it is where another tensor has taken its place."""
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
        """What the note says."""
        state = {key: info_field for key, note in self.state.items() if (info_field := _tensor_info(note)) is not None}
        tensor, gradient = _tensor_info(self.tensor), _tensor_info(self.gradient)
        late = self.has_late_gradient, self.late_state
        return ParameterInfo(self.name, self.type, self.requires_grad, tensor, gradient, state, *late)


class TensorNotes:
    """Takes notes of tensors, where torch is imported. Costs about half a microsecond per tensor; any thread.

    Only of ``torch.Tensor`` and ``torch.nn.Parameter`` themselves: classes derived from them may answer with code of their
    own. :attr:`without_modes` must surround every use, since a mode of the program's would be asked for each attribute.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        native = torch._C  # noqa: SLF001 - no other module has these
        self._plain = {kind: class_name(kind) for kind in (torch.nn.Parameter, torch.Tensor)}
        self._strided = torch.strided
        self._requires_grad = native.TensorBase.requires_grad.__get__
        self._is_tracing: Callable[[], bool] = native._is_tracing  # noqa: SLF001 - nor another name for it
        self._address: Callable[[Any], int] = getattr(native, "_data_address", _address)
        self.without_modes: Callable[[], Any] = native.DisableTorchFunction

    def note_of(self, tensor: Any) -> Note | None:
        """The note of a tensor; None of what is no tensor, of another class, or has no shape to tell."""
        if type(tensor) not in self._plain:
            return None
        try:
            return _SEEN(tensor), tensor.stride(), self._address(tensor)
        except Exception:  # noqa: BLE001 - no strides or no storage, or not even a shape
            return self._of_odd(tensor)

    def _of_odd(self, tensor: Any) -> Note | None:
        """Of a sparse tensor, which has neither strides nor storage, or of one inside ``torch.vmap``; nested ones have no shape."""
        try:
            return _SEEN(tensor), tensor.stride() if tensor.layout is self._strided else (), 0
        except Exception:  # noqa: BLE001 - the program is to continue whatever it is
            return None

    def of_parameter(self, name: str, parameter: Any, state: Any = None) -> ParameterNote:
        """The note of a parameter with its gradient; ``state``: what an optimizer keeps of it, by name."""
        kind = self._plain.get(type(parameter))
        # To ask for a shape while torch.jit.trace runs puts operators into what it traces.
        if kind is None or self._is_tracing():
            return ParameterNote(name, class_name(type(parameter)), self._requires_gradient(parameter), None, None)
        # Torch warns where somebody asks for a gradient that is not kept.
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
        except Exception:  # noqa: BLE001 - no tensor at all
            return False


def class_name(kind: type) -> str:
    """A class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _address(tensor: Any) -> int:
    """Where the storage begins, in versions of torch that have no function for it."""
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
    """Notes of the same things, taken twice; what has come since the first look is at the end of the later ones."""
    both = zip(first, later, strict=False)
    return (*(a.completed(b) for a, b in both), *first[len(later) :], *later[len(first) :])


class _NotedObject:
    """Something that was noted, and may have been collected since. The note is replaced as a whole, never changed."""

    __slots__ = ("note", "reference", "thread")

    def __init__(self, what: Any, note: Any) -> None:
        self.reference = weakref.ref(what)
        self.note = note
        self.thread = threads.get_ident()


def _complete(entry: _NotedObject, again: Callable[[Any, Any], Any]) -> None:
    what = entry.reference()
    # Not what another thread called, which may be in its backward pass: that replaces gradients without Python's lock, and torch
    # does not survive it when somebody reads one meanwhile.
    if what is not None and entry.thread == threads.get_ident():
        # Whatever the program has made of it meanwhile, the first note is there.
        with suppress(Exception):
            entry.note = again(what, entry.note)


class ObjectNotes:
    """Notes of what the tracer meets for the first time. Keeps no module, optimizer or tensor alive; codes until they are read.

    Everything may be called by any thread, in the middle of a program's step: no operator is run, nor code of the program's,
    nothing waits, and what cannot be noted is left out. Costs well under a microsecond per function, some per module and
    about one for each of its parameters.
    """

    def __init__(self) -> None:
        self._codes: deque[tuple[int, CodeType, str | None]] = deque()
        self.add_code: Callable[[tuple[int, CodeType, str | None]], None] = self._codes.append
        """A function is called: (id of its name, its code, the ``__name__`` of the module that it is of).

        No Python code: a handler of a signal would run in it, and what that raises would be lost.
        """
        self._functions: dict[int, tuple[str | None, str, str, int]] = {}
        self._modules: dict[int, _NotedObject] = {}
        self._optimizers: dict[int, _NotedObject] = {}
        self._names = ModuleNames()
        self._latest: Table | None = None
        self._tensors: TensorNotes | None = None

    def add_module(self, name_id: int, module: Any) -> None:
        """A module is called; what is around it has been, already. Takes a name over from another module."""
        with suppress(Exception):  # no module as torch makes them; the program is to continue
            self._modules[name_id] = _NotedObject(module, self._note_of_module(module))

    def add_optimizer(self, identity: int, optimizer: Any) -> None:
        """An optimizer makes a step. Takes a number over from another one."""
        with suppress(Exception):  # no optimizer as torch makes them; the program is to continue
            self._optimizers[identity] = _NotedObject(optimizer, self._note_of_optimizer(optimizer))

    def finish(self) -> FrameInfo:
        """What is known at the end of a recording, completed by another look at what this thread called and lives still.

        Others may continue with the same book. Costs about a microsecond per function, and per parameter without a gradient.
        """
        for entry in list(self._modules.values()):
            _complete(entry, self._note_again)
        for entry in list(self._optimizers.values()):
            _complete(entry, self._optimizer_again)
        return self.info()

    def info(self) -> FrameInfo:
        """What is known so far: plain data."""
        with suppress(IndexError):  # another thread may take the last one
            while True:
                self._note_function(*self._codes.popleft())
        # Copies, which take one step: a list of items makes tuples, hence collections of garbage, whose finalizers may call a module.
        modules = {number: entry.note for number, entry in self._modules.copy().items()}
        optimizers = {number: entry.note for number, entry in self._optimizers.copy().items()}
        return FrameInfo(
            LazyInfo(dict(self._functions), _function_info),
            LazyInfo(modules, _ModuleNote.info),
            LazyInfo(optimizers, _OptimizerNote.info),
        )

    def _note_function(self, name_id: int, code: CodeType, module_name: str | None) -> None:
        name = getattr(code, "co_qualname", code.co_name)  # 3.11 and later have it
        self._functions.setdefault(name_id, (module_name, name, code.co_filename, code.co_firstlineno))

    def _note_of_module(self, module: Any) -> _ModuleNote:
        self._latest = table = self._names.find(module, self._latest)
        name = table[id(module)]
        # Beside a tuple's text stands the wrapper that is called in the module's place.
        full_name = name if isinstance(name, str) else name[0]
        kind = type(module)
        pointers = id(module), id(kind)
        return _ModuleNote(full_name, table.root_name, class_name(kind), self._parameters_of(module), pointers)

    def _parameters_of(self, module: Any) -> tuple[ParameterNote, ...]:
        found = held_items(module, "_parameters")
        if not found:
            return ()
        tensors = self._tensor_notes()
        with tensors.without_modes():
            return tuple([tensors.of_parameter(name, parameter) for name, parameter in found])

    def _note_again(self, module: Any, before: _ModuleNote) -> _ModuleNote:
        if all(note.gradient is not None for note in before.parameters):
            return before
        now = {note.name: note for note in self._parameters_of(module)}
        completed = (note.completed(now.get(note.name, note)) for note in before.parameters)
        return before._replace(parameters=tuple(completed))

    def _note_of_optimizer(self, optimizer: Any) -> _OptimizerNote:
        # Found by identity: a tensor as a key would be asked for its hash.
        state = {id(parameter): kept for parameter, kept in dict.copy(held(optimizer, "state")).items()}
        names = self._names_of_parameters()
        tensors = self._tensor_notes()
        with tensors.without_modes():
            groups = [_note_of_group(group, state, names, tensors) for group in held(optimizer, "param_groups")]
        return _OptimizerNote(class_name(type(optimizer)), tuple(groups), id(optimizer))

    def _optimizer_again(self, optimizer: Any, before: _OptimizerNote) -> _OptimizerNote:
        notes = [note for group in before.groups for note in group.parameters]
        if any(note.state for note in notes) and all(note.gradient is not None for note in notes):
            return before
        return before._replace(groups=_completed(before.groups, self._note_of_optimizer(optimizer).groups))

    def _names_of_parameters(self) -> dict[int, str]:
        """Full names of the parameters of the modules that live, by id."""
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
    # Those that an optimizer was given with their names, which torch has since 2.6.
    given = group.get("param_names") or [names.get(id(parameter), "") for parameter in parameters]
    notes = [
        tensors.of_parameter(name, parameter, state.get(id(parameter)))
        for name, parameter in zip(given, parameters, strict=True)
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
