"""What Python writes down of C, numbers and layouts, is what the headers declare."""

from __future__ import annotations

import numpy as np
import pytest
from cffi import FFI

from otel_torchprof._columns.phases import Part
from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS, CollectiveFlag, Flag, Kind, MemoryFlag
from otel_torchprof._model.inputs import InputKept, InputKind, InputPart
from otel_torchprof._model.span_table import LINK, AttributeType
from otel_torchprof._native import device_timing, recorder, torch_functions, torch_library
from otel_torchprof._native.ffi import ffi
from otel_torchprof._native.torch_library import Requested
from otel_torchprof._native.torch_ranges import Parts, RangeFunctions

torch_ffi = FFI()
torch_ffi.cdef(torch_functions.CDEF.read_text())


@pytest.mark.parametrize(
    ("known", "declared", "enumeration", "prefix"),
    [
        (Kind, ffi, "otp_event_kind", "OTP_EVENT_"),
        (Flag, ffi, "otp_event_flag", "OTP_FLAG_"),
        (Part, ffi, "otp_phase", "OTP_PHASE_"),
        (MemoryFlag, ffi, "otp_memory_flag", "OTP_MEMORY_"),
        (InputKind, ffi, "otp_input_kind", "OTP_INPUT_"),
        (InputPart, ffi, "otp_input_part", "OTP_PART_"),
        (InputKept, ffi, "otp_input_kept", "OTP_KEEP_"),
        (AttributeType, ffi, "otp_attribute_type", "OTP_ATTRIBUTE_"),
        (Requested, torch_ffi, "otp_torch_requests", "OTP_REQUEST_"),
        (Parts, torch_ffi, "otp_range_parts", "OTP_RANGE_"),
        (CollectiveFlag, torch_ffi, "otp_collective_flag", "OTP_COLLECTIVE_"),
    ],
)
def test_enumerations(known, declared, enumeration, prefix):
    """An enumeration of Python's has the names and numbers of the one in C, but for how many there are."""
    numbers = {name.removeprefix(prefix): n for name, n in declared.typeof(f"enum {enumeration}").relements.items()}
    counts = {"KINDS", "COUNT"}
    assert {name: n for name, n in numbers.items() if name not in counts} == {each.name: each.value for each in known}


@pytest.mark.parametrize(
    ("known", "declared", "enumeration", "prefix"),
    [
        (recorder.LOSS_REASONS, ffi, "otp_loss", "OTP_LOSS_"),
        (tuple(device_timing.DEVICE_EVENTS), torch_ffi, "otp_device_events", "OTP_DEVICE_EVENTS_"),
    ],
)
def test_names_in_order(known, declared, enumeration, prefix):
    """Names that stand for the numbers of an enumeration are those of C, in its order."""
    elements = declared.typeof(f"enum {enumeration}").elements
    assert tuple(elements[n].removeprefix(prefix).lower() for n in sorted(elements))[: len(known)] == known


@pytest.mark.parametrize(
    ("dtype", "declared", "struct"),
    [
        (torch_library.STORAGE, ffi, "otp_storage"),
        (LINK, ffi, "otp_link"),
        (torch_library.COLLECTIVE_ENTRY, torch_ffi, "otp_collective"),
    ],
)
def test_layouts(dtype, declared, struct):
    """A dtype has the fields of a struct where the struct has them, and its size."""
    fields = {name: (field.offset, declared.sizeof(field.type)) for name, field in declared.typeof(struct).fields}
    assert {name: (offset, kind.itemsize) for name, (kind, offset, *_) in dtype.fields.items()} == fields
    assert dtype.itemsize == declared.sizeof(struct)


def test_columns_of_collectives_are_integers_of_the_same_sign():
    """A column of collectives is as wide and as signed as the field that it is read from."""
    fields = dict(torch_ffi.typeof("otp_collective").fields)
    assert {c.name: f"{np.dtype(c.dtype).name}_t" for c in COLLECTIVE_COLUMNS} == {
        name: field.type.cname for name, field in fields.items()
    }


@pytest.mark.parametrize(
    ("names", "declared", "struct"),
    [
        (device_timing.DeviceCounts._fields, torch_ffi, "otp_device_counts"),
        (device_timing.DeviceStats._fields, torch_ffi, "otp_device_stats"),
        (tuple(name for name, *_ in RangeFunctions._fields_), torch_ffi, "otp_range_functions"),
    ],
)
def test_fields(names, declared, struct):
    """Every field of a struct is read, and in the order of C where that counts."""
    assert names == tuple(name for name, _ in declared.typeof(struct).fields)
