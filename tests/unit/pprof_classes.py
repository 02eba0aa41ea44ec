"""The class of pprof's message ``Profile``, made from the fields of its profile.proto, and a profile by stack."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from pathlib import Path

_MESSAGES = {
    "ValueType": "type:1:int64 unit:2:int64",
    "Label": "key:1:int64 str:2:int64 num:3:int64 num_unit:4:int64",
    "Sample": "location_id:1:uint64* value:2:int64* label:3:Label*",
    "Mapping": "id:1:uint64 memory_start:2:uint64 memory_limit:3:uint64 file_offset:4:uint64 filename:5:int64 build_id:6:int64",
    "Line": "function_id:1:uint64 line:2:int64 column:3:int64",
    "Location": "id:1:uint64 mapping_id:2:uint64 address:3:uint64 line:4:Line* is_folded:5:bool",
    "Function": "id:1:uint64 name:2:int64 system_name:3:int64 filename:4:int64 start_line:5:int64",
    "Profile": "sample_type:1:ValueType* sample:2:Sample* mapping:3:Mapping* location:4:Location* function:5:Function* "
    "string_table:6:string* drop_frames:7:int64 keep_frames:8:int64 time_nanos:9:int64 duration_nanos:10:int64 "
    "period_type:11:ValueType period:12:int64 comment:13:int64* default_sample_type:14:int64 doc_url:15:int64",
}
"""Name, number and type of each field; repeated ones have a star."""


def _class() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools.profiles", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, number, kind = text.split(":")
            label = types.LABEL_REPEATED if kind.endswith("*") else types.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            added = message.field.add(name=field, number=int(number), label=label)
            if kind in _MESSAGES:
                added.type, added.type_name = types.TYPE_MESSAGE, f".perftools.profiles.{kind}"
            else:
                added.type = getattr(types, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.profiles.Profile"))


Profile = _class()


def read(path: Path) -> Any:
    """The message in a file, compressed or not."""
    content = path.read_bytes()
    return Profile.FromString(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)


def samples(profile: Any) -> list[tuple[tuple[str, ...], dict[str, str], dict[str, int]]]:
    """The stack of each sample from the top level down, its labels, and its values by type."""
    texts = profile.string_table
    functions = {each.id: each for each in profile.function}
    lines = {each.id: each.line[0].function_id for each in profile.location}
    types = [texts[each.type] for each in profile.sample_type]
    return [
        (
            tuple(texts[functions[lines[number]].name] for number in reversed(sample.location_id)),
            {texts[label.key]: texts[label.str] for label in sample.label},
            dict(zip(types, sample.value, strict=True)),
        )
        for sample in profile.sample
    ]


def sums_by_name(profile: Any, kind: str) -> dict[str, int]:
    """Sum of the values of a type by the innermost call."""
    sums: dict[str, int] = {}
    for stack, _, values in samples(profile):
        if stack:
            sums[stack[-1]] = sums.get(stack[-1], 0) + values[kind]
    return sums
