"""OTLP profiles, read by opentelemetry-proto's classes: the samples are those of pprof's format, and the dictionary obeys its rules."""

from __future__ import annotations

import gzip
import json

import pprof_classes
import pytest
from kineto_events import cuda_trace
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData
from opentelemetry.sdk.resources import Resource
from profile_messages import attributes, profiles, read, samples, samples_of_pprof, stack
from sampled_profiles import MS, profile_with
from sampled_profiles import samples as taken

import otel_torchprof as otp
from otel_torchprof._cli import main as cli


def work():
    """A Python call of a profile."""


def labelled(steps=5, **options):
    """A profile of labels in steps."""
    with otp.profile(operators=False, **options) as prof:
        for _ in range(steps):
            with otp.record_function("outer"), otp.record_function("inner"):
                work()
            prof.step()
    return prof


def hostile():
    with otp.profile(operators=False) as prof:
        for name in ("a\0b", "\ud800", "x" * 10_000, "<script>", "\n(1): f", "f(0): ", "a.py(99999999999999999999): f"):
            with otp.record_function(name):
                pass
    return prof


def of_kernels(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(cuda_trace()))
    return otp.load(tmp_path / "t.json")


CASES = {
    "labels in steps": lambda _: labelled(),
    "no steps": lambda _: labelled(0),
    "Python calls": lambda _: labelled(2, with_stack=True),
    "sampled stacks": lambda _: profile_with(taken([5 * MS, 12 * MS, 29 * MS, 31 * MS, 59 * MS], [0, 1, 0, 2, 1])),
    "a stack without calls": lambda _: profile_with(taken([5 * MS, 12 * MS], [0, 1], stacks=[(), ()]), steps=False),
    "kernels": of_kernels,
    "hostile names": lambda _: hostile(),
}


@pytest.fixture(params=CASES)
def prof(request, tmp_path):
    return CASES[request.param](tmp_path)


def test_samples_are_those_of_pprof(prof, tmp_path):
    """Both formats have the same stacks with the same values, steps and phases."""
    prof.export_as(tmp_path / "p.otlp-profiles")
    prof.export_as(tmp_path / "p.pb")
    found = samples(read(tmp_path / "p.otlp-profiles"))
    assert found == samples_of_pprof(pprof_classes.read(tmp_path / "p.pb"))


def test_the_dictionary(prof, tmp_path):
    """First entries are empty, no entry occurs twice or is unused, and each index is one of an entry."""
    prof.export_as(tmp_path / "p.otlp-profiles")
    message = read(tmp_path / "p.otlp-profiles")
    dictionary, found = message.dictionary, [each for of in profiles(message).values() for each in of.samples]
    places = {
        "mapping_table": [],
        "location_table": [place for each in dictionary.stack_table for place in each.location_indices],
        "function_table": [line.function_index for each in dictionary.location_table for line in each.lines],
        "link_table": [sample.link_index for sample in found],
        "attribute_table": [at for each in (*found, *dictionary.location_table) for at in each.attribute_indices],
        "stack_table": [sample.stack_index for sample in found],
        "string_table": [
            *(each.key_strindex for each in dictionary.attribute_table),
            *(at for each in dictionary.function_table for at in (each.name_strindex, each.filename_strindex)),
            *(
                at
                for of in profiles(message).values()
                for at in (of.sample_type.type_strindex, of.sample_type.unit_strindex)
            ),
        ],
    }
    for name, used in places.items():
        table = getattr(dictionary, name)
        assert not table[0] or table[0] == type(table[0])(), name
        assert set(used) | {0} == set(range(len(table))), name
        assert len({each if isinstance(each, str) else each.SerializeToString() for each in table}) == len(table), name


def test_what_the_profiles_are_of(tmp_path):
    """Self times are first, with the start and duration of the recording, its resource and the package's scope; sums are the averages."""
    prof = labelled()
    prof.export_as(tmp_path / "p.otlp-profiles.gz", resource=Resource({"service.name": "trainer", "n": 3}))
    message = ProfilesData.FromString(gzip.decompress((tmp_path / "p.otlp-profiles.gz").read_bytes()))
    [of_resource] = message.resource_profiles
    assert {each.key: each.value.string_value or each.value.int_value for each in of_resource.resource.attributes} == {
        "service.name": "trainer",
        "n": 3,
    }
    assert of_resource.scope_profiles[0].scope.name == "otel_torchprof"
    assert [*profiles(message)][:2] == ["time", "calls"]  # a busy machine may have given time for a sample of the stack
    for kind, value in (("calls", lambda a: a.count), ("time", lambda a: round(a.self_cpu_time_total * 1000))):
        profile, sums = profiles(message)[kind], {}
        for (of, calls, _), amount in samples(message).items():
            if of == kind:
                sums[calls[-1][0]] = sums.get(calls[-1][0], 0) + amount
        assert sums == {average.key: value(average) for average in prof.key_averages()}
        assert (profile.time_unix_nano, profile.duration_nano) == (
            prof.health.start_ns,
            prof.health.stop_ns - prof.health.start_ns,
        )


@pytest.mark.parametrize("steps", [3, 0])
def test_links(tmp_path, steps):
    """A sample links to the span of its step, or of the profile if this has no steps, as ``spans()`` has it; none to others."""
    prof = labelled(steps)
    if not steps:
        prof = profile_with(taken([5 * MS], [0]), steps=False)
    prof.export_as(tmp_path / "p.otlp-profiles")
    message = read(tmp_path / "p.otlp-profiles")
    ids = {
        span.attributes.get("torch.step.number"): (span.context.trace_id, span.context.span_id)
        for span in prof.spans()
        if span.name in {"torch.step", "torch.profile"}
    }
    assert len(ids) == max(steps, 1)
    for profile in profiles(message).values():
        for sample in profile.samples:
            link = message.dictionary.link_table[sample.link_index]
            assert ids[attributes(message.dictionary, sample).get("torch.step.number")] == (
                int.from_bytes(link.trace_id, "big"),
                int.from_bytes(link.span_id, "big"),
            )


def test_a_converted_file(tmp_path, capsys):
    """``convert`` writes the sums without links: the ids of the file's own spans are not known; it says what the format lacks."""
    labelled().export_as(tmp_path / "t.otlp")
    assert cli.main(["convert", "-q", str(tmp_path / "t.otlp"), "-o", str(tmp_path / "p.otlp-profiles")]) == 0
    message = read(tmp_path / "p.otlp-profiles")
    assert len(message.dictionary.link_table) == 1
    assert {key[1][-1][0]: value for key, value in samples(message).items() if key[0] == "calls"}.keys() == {
        "outer",
        "inner",
    }
    assert "sums by stack, step and phase" in capsys.readouterr().err


def test_python_calls(tmp_path):
    """Calls have function, file and line, and say that they are of Python; other locations say nothing."""
    labelled(2, with_stack=True).export_as(tmp_path / "p.otlp-profiles")
    message = read(tmp_path / "p.otlp-profiles")
    seen = {stack(message.dictionary, sample)[-1] for sample in profiles(message)["calls"].samples}
    [(_, file, line)] = [call for call in seen if call[0] == "work"]
    assert __file__.endswith(file)
    assert line == work.__code__.co_firstlineno
    for location in message.dictionary.location_table[1:]:
        function = message.dictionary.function_table[location.lines[0].function_index]
        expected = {"profile.frame.type": "cpython"} if function.filename_strindex else {}
        assert attributes(message.dictionary, location) == expected


def test_an_empty_profile(tmp_path):
    """Nothing was recorded: profiles without samples."""
    with otp.profile(operators=False, sampling=False) as prof:
        pass
    prof.export_as(tmp_path / "p.otlp-profiles")
    assert {kind: len(each.samples) for kind, each in profiles(read(tmp_path / "p.otlp-profiles")).items()} == {
        "time": 0,
        "calls": 0,
    }
