"""OTLP profiles read by opentelemetry-proto's classes, and samples of both formats of profiles in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path) -> ProfilesData:
    """The message in a file."""
    return ProfilesData.FromString(path.read_bytes())


def profiles(message: ProfilesData) -> dict[str, Any]:
    """The profiles of a message by type of value."""
    [of_resource] = message.resource_profiles
    [of_scope] = of_resource.scope_profiles
    texts = message.dictionary.string_table
    return {texts[profile.sample_type.type_strindex]: profile for profile in of_scope.profiles}


def stack(dictionary: Any, sample: Any) -> tuple[tuple[str, str, int], ...]:
    """Function, file and line of each call of a sample, from the top level down."""
    calls = []
    for place in reversed(dictionary.stack_table[sample.stack_index].location_indices):
        [line] = dictionary.location_table[place].lines
        function = dictionary.function_table[line.function_index]
        texts = (dictionary.string_table[at] for at in (function.name_strindex, function.filename_strindex))
        calls.append((*texts, line.line))
    return tuple(calls)


def attributes(dictionary: Any, holder: Any) -> dict[str, Any]:
    """The attributes of a sample or location."""
    entries = (dictionary.attribute_table[place] for place in holder.attribute_indices)
    return {
        dictionary.string_table[entry.key_strindex]: getattr(entry.value, str(entry.value.WhichOneof("value")))
        for entry in entries
    }


def samples(message: ProfilesData) -> dict[tuple[Any, ...], int]:
    """Each value by its type, its stack and its attributes; equal ones would be one sample."""
    dictionary, found = message.dictionary, {}
    for kind, profile in profiles(message).items():
        for sample in profile.samples:
            key = kind, stack(dictionary, sample), tuple(sorted(attributes(dictionary, sample).items()))
            assert key not in found
            [found[key]] = sample.values
    return found


def samples_of_pprof(profile: Any) -> dict[tuple[Any, ...], int]:
    """The same of a profile of pprof, without the rank, which the resource has; values that are 0 left out."""
    texts, found = profile.string_table, {}
    functions = {each.id: each for each in profile.function}
    calls = {}
    for location in profile.location:
        [line] = location.line
        function = functions[line.function_id]
        name, file = texts[function.name], texts[function.filename]
        calls[location.id] = (
            name.removesuffix(f":{line.line}").removesuffix(f" {file}") if file else name,
            file,
            line.line,
        )
    for sample in profile.sample:
        labels = {texts[label.key]: texts[label.str] for label in sample.label}
        named = {"torch.phase.name": labels.get("phase"), "torch.step.number": labels.get("step")}
        number = named["torch.step.number"]
        named["torch.step.number"] = None if number is None else int(number)
        place = tuple(calls[number] for number in reversed(sample.location_id))
        of_sample = tuple((name, value) for name, value in named.items() if value is not None)
        for kind, value in zip(profile.sample_type, sample.value, strict=True):
            if value:
                key = texts[kind.type], place, of_sample
                assert key not in found
                found[key] = value
    return found
