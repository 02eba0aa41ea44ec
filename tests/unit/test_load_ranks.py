"""``otp.load_ranks``: the files of a job as profiles by rank."""

from __future__ import annotations

import json

import pytest
from kineto_events import event

import otel_torchprof as otp


@pytest.fixture
def write(tmp_path):
    """Writes a trace of torch's profiler."""

    def write(name, rank, *events):
        members = {} if rank is None else {"distributedInfo": {"rank": rank}}
        (tmp_path / name).write_text(json.dumps({**members, "traceEvents": events}))
        return tmp_path / name

    return write


def test_a_folder_is_its_traces(write, tmp_path):
    """Files of traces are profiles in the order of their ranks, whatever their formats; other files are not read."""
    for rank in (10, 2):
        write(f"t{rank}.json", rank, *[event(f"aten::op{rank}", ts, 1) for ts in range(rank)])
    (tmp_path / "notes.txt").write_text("no trace")
    with otp.profile(operators=False) as prof, otp.record_function("label"):
        pass
    prof.export_otlp(tmp_path / "own.otlp.gz", resource=otp_resource(1))
    ranks = otp.load_ranks(tmp_path)
    assert list(ranks) == [1, 2, 10]
    assert [len(each.events()) for each in ranks.values()] == [1, 2, 10]
    assert repr(ranks) == "<profiles of ranks 1, 2, 10>"
    assert repr(otp.load_ranks([tmp_path / "t2.json"])) == "<profiles of rank 2>"


def otp_resource(rank):
    from opentelemetry.sdk.resources import Resource

    return Resource({"torch.distributed.rank": rank})


def test_files_without_an_own_rank_are_refused(write, tmp_path):
    """Files that do not say their rank, two of one rank, and folders without traces raise errors that name them."""
    first, same, none = write("a.json", 0), write("b.json", 0), write("c.json", None)
    with pytest.raises(otp.TorchProfError, match=r"b\.json' is of rank 0, as .*a\.json'"):
        otp.load_ranks([first, same])
    with pytest.raises(otp.TorchProfError, match=r"c\.json' does not say of which rank it is"):
        otp.load_ranks([first, none])
    with pytest.raises(otp.TorchProfError, match="is a folder: load_ranks reads"):
        otp.load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(otp.TorchProfError, match="no traces in"):
        otp.load_ranks(tmp_path / "empty")
    with pytest.raises(otp.TorchProfError, match=r"a\.json' is no folder"):
        otp.load_ranks(first)
    with pytest.raises(ValueError, match="memory_limit is 0"):
        otp.load_ranks([first], memory_limit=0)


def test_the_limit_is_that_of_all_files(write):
    """Each file gets its share of the memory; what is above it is reported as by ``load``."""
    paths = [write(f"{rank}.json", rank, *[event("a", ts, 1) for ts in range(70_000)]) for rank in range(2)]
    notes = [each.health.notes for each in otp.load_ranks(paths, memory_limit=2 << 20).values()]
    assert all("more than the limit of 1 MiB" in note[0] for note in notes)
