"""Spans as the native encoders take them (``otp_spans`` in ``encode.h``): the caller's arrays, of which nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .ffi import ffi

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from otel_torchprof._columns.batch import Names

Array = npt.NDArray[Any]
_POINTERS = {name: field.type.item for name, field in ffi.typeof("otp_spans").fields if field.type.kind == "pointer"}
_ARRAYS = {name: ffi.typeof(f"{item.cname}[]") for name, item in _POINTERS.items()}
_BYTES, _ENDS, _TEXT = (ffi.typeof(kind) for kind in ("uint8_t[]", "uint64_t[]", "char[]"))


class SpanAttribute(NamedTuple):
    """One attribute of all spans (``otp_attribute``)."""

    key: bytes
    type: int
    """``otp_attribute_type``, which says what the values are."""
    values: Array
    present: Array | None
    """uint8: which rows have it; None: all."""


class SpanColumns:
    """The columns of spans, as the encoders see them, for as long as this object lives. Nothing is checked here.

    Args:
        count: of the spans.
        columns: the arrays of ``otp_spans``, by name, with values as wide as the struct's.
        attributes: in their order.
        link_count: of the column ``links``.
        names: that the columns point into.
    """

    def __init__(
        self,
        count: int,
        columns: Mapping[str, Array],
        attributes: Iterable[SpanAttribute],
        link_count: int,
        names: Names,
    ) -> None:
        self._alive: list[Any] = []
        views = [self._attribute(attribute) for attribute in attributes]
        self.native: Any = ffi.new(
            "otp_spans *",
            {
                **{name: self._array(_ARRAYS[name], values) for name, values in columns.items()},
                "count": count,
                "attributes": self._keep(ffi.new("otp_attribute[]", views)),
                "attribute_count": len(views),
                "link_count": link_count,
                "names": self._names(names),
            },
        )
        """The ``otp_spans *``."""

    def _keep(self, pointer: Any) -> Any:
        self._alive.append(pointer)
        return pointer

    def _array(self, kind: Any, values: Array) -> Any:
        return self._keep(ffi.from_buffer(kind, np.ascontiguousarray(values)))

    def _attribute(self, attribute: SpanAttribute) -> dict[str, Any]:
        values = self._array(_TEXT, attribute.values)
        return {
            "key": self._keep(ffi.from_buffer(_TEXT, attribute.key)),
            "key_size": len(attribute.key),
            "type": attribute.type,
            "values": ffi.cast("void *", values),
            "present": ffi.NULL if attribute.present is None else self._array(_BYTES, attribute.present),
        }

    def _names(self, names: Names) -> dict[str, Any]:
        data, ends, added = self._array(_BYTES, names.data), self._array(_ENDS, names.ends), names.added
        views = {"data": data, "ends": ends, "count": len(names.ends)}
        if added is not None:
            views |= {"more_data": self._array(_BYTES, added.data), "more_ends": self._array(_ENDS, added.ends)}
        return views
