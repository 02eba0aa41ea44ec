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
_C_TYPES = {np.dtype(f"{sign}{size}"): f"{'u' * (sign == 'u')}int{8 * size}_t[]" for sign in "iu" for size in (1, 4, 8)}


class SpanAttribute(NamedTuple):
    """One attribute of all spans (``otp_attribute``)."""

    key: bytes
    type: int
    """``otp_attribute_type``, which says what the values are."""
    values: Array
    present: Array | None
    """uint8: which rows have it; None: all."""


class SpanColumns:
    """The columns of spans, lent to the encoders for as long as this object lives. Nothing is checked here.

    Args:
        count: of the spans.
        columns: the arrays of integers of ``otp_spans``, by name.
        attributes: in their order.
        links: of ``otp_link``, by row.
        names: that the columns point into.
    """

    def __init__(
        self,
        count: int,
        columns: Mapping[str, Array],
        attributes: Iterable[SpanAttribute],
        links: Array,
        names: Names,
    ) -> None:
        self._alive: list[Any] = []
        lent = [self._attribute(attribute) for attribute in attributes]
        self.native: Any = ffi.new(
            "otp_spans *",
            {
                **{name: self._array(values) for name, values in columns.items()},
                "count": count,
                "attributes": self._keep(ffi.new("otp_attribute[]", lent)),
                "attribute_count": len(lent),
                "links": self._keep(ffi.from_buffer("otp_link[]", np.ascontiguousarray(links))),
                "link_count": len(links),
                "names": self._names(names),
            },
        )
        """The ``otp_spans *``."""

    def _keep(self, pointer: Any) -> Any:
        self._alive.append(pointer)
        return pointer

    def _array(self, values: Array) -> Any:
        return self._keep(ffi.from_buffer(_C_TYPES[values.dtype], np.ascontiguousarray(values)))

    def _attribute(self, attribute: SpanAttribute) -> dict[str, Any]:
        values = self._keep(ffi.from_buffer("char[]", np.ascontiguousarray(attribute.values)))
        return {
            "key": self._keep(ffi.from_buffer("char[]", attribute.key)),
            "key_size": len(attribute.key),
            "type": attribute.type,
            "values": ffi.cast("void *", values),
            "present": ffi.NULL if attribute.present is None else self._array(attribute.present),
        }

    def _names(self, names: Names) -> dict[str, Any]:
        lent = {"data": self._array(names.data), "ends": self._array(names.ends), "count": len(names.ends)}
        if names.added is not None:
            lent |= {"more_data": self._array(names.added.data), "more_ends": self._array(names.added.ends)}
        return lent
