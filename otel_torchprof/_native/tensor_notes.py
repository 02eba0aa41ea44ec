"""Tensors and parameters noted without running an operator or a program's code: tuples now, facts when somebody reads them."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.frame_info import ParameterInfo, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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

    def of(self, tensor: Any) -> Note | None:
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
        gradient = self.of(parameter.grad) if kept else None
        note = ParameterNote(name, kind, parameter.requires_grad, self.of(parameter), gradient)
        return note._replace(state=self._of_state(state)) if isinstance(state, dict) else note

    def _of_state(self, state: dict[Any, Any]) -> dict[str, Note]:
        return {key: note for key, value in list(dict.items(state)) if type(key) is str and (note := self.of(value))}

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
