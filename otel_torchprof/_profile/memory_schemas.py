"""Which inputs an operator writes to, by torch's schemas.

A recording has an operator's name and its inputs, not its overload; every overload that the inputs fit is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._native.torch_library import installed_torch
from otel_torchprof._tree.input_words import InputKind

if TYPE_CHECKING:
    from collections.abc import Sequence


def written_inputs(name: str, kinds: Sequence[InputKind]) -> tuple[bool, ...] | None:
    """For each input, whether an operator with that name and such inputs may write to it; None: no operator is known.

    Inputs fit a schema as torch's memory profiler has it: what it does not record fits what may be left out, and types that
    it does not know. Imports torch. Costs some 100 us for the first question about a name.
    """
    fitting = [arguments for arguments in _schemas(name) if _fit(kinds, arguments)]
    if not fitting:
        return None
    return tuple(any(is_written for _, is_written in overloads) for overloads in zip(*fitting, strict=True))


_known: dict[str, tuple[tuple[tuple[Any, bool], ...], ...]] = {}
"""Of operators that exist: others may be registered later."""


def _schemas(name: str) -> tuple[tuple[tuple[Any, bool], ...], ...]:
    """For each overload of an operator the type of every argument, and whether it is written to."""
    if name in _known:
        return _known[name]
    torch = installed_torch()
    if torch is None or "::" not in name:
        return ()
    try:
        found = torch._C._jit_get_schemas_for_operator(name)  # noqa: SLF001 - no other way
    except RuntimeError:  # a name that no operator can have
        return ()
    schemas = tuple(
        tuple((argument.type, getattr(argument.alias_info, "is_write", False)) for argument in schema.arguments)
        for schema in found
    )
    if schemas:
        _known[name] = schemas
    return schemas


def _fit(kinds: Sequence[InputKind], arguments: Sequence[tuple[Any, bool]]) -> bool:
    return len(kinds) == len(arguments) and all(
        _fits(kind, requested) for kind, (requested, _) in zip(kinds, arguments, strict=True)
    )


_NOTHING = frozenset((InputKind.OTHER, InputKind.SCALAR_LIST, InputKind.STRING))
"""Inputs that torch's profiler tells as None."""

_SCALARS = {
    "IntType": (InputKind.INT, InputKind.BOOL),
    "BoolType": (InputKind.BOOL,),
    "FloatType": (InputKind.DOUBLE,),
    "ComplexType": (InputKind.COMPLEX,),
    "NumberType": (InputKind.INT, InputKind.BOOL, InputKind.DOUBLE, InputKind.COMPLEX),
}


def _fits(kind: InputKind, requested: Any) -> bool:
    name = type(requested).__name__
    if name == "OptionalType":
        return kind in _NOTHING or _fits(kind, requested.getElementType())
    if name == "AnyType":
        return True
    if name == "TensorType":
        return kind is InputKind.TENSOR
    if name == "ListType" and type(requested.getElementType()).__name__ == "TensorType":
        return kind is InputKind.TENSOR_LIST
    return kind in _SCALARS.get(name, _NOTHING)
