"""``merge`` and ``explain`` of the ranks of a job that torch.profiler recorded, whose collectives have numbers or only an order."""

from __future__ import annotations

from pathlib import Path

import pytest
from explained_files import STEP_MS, kineto, piece

import otel_torchprof as otp
from otel_torchprof._files.merge import merge

STEPS, LATE_MS = 60, 4.0
GROUPS = {"world_size": 3, "pg_count": 1, "pg_config": [{"pg_name": "0", "pg_size": 3}]}


def gloo(_rank, number, begin, end):
    """A call of gloo in a step, and its work."""
    return [piece("c10d::allreduce_", begin, 0.1), piece("gloo:all_reduce", begin + 0.2, end - begin - 0.2, tid=9)]


def nccl(_rank, number, begin, end, **kernel):
    """A call of NCCL that torch numbers, and its kernel."""
    args = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]"}
    work = {"cat": "kernel", "pid": 0, "tid": 7, "args": {**args, "Seq": number, "stream": 7, **kernel}}
    return [
        piece("record_param_comms", begin - 1, 0.1, args={**args, "Seq": number}),
        piece("nccl:all_reduce", begin - 1, 0.1, cat="user_annotation"),
        piece("ncclDevKernel_AllReduce", begin, end - begin, **work),
    ]


@pytest.fixture
def ranks(tmp_path):
    """Writes the files of three ranks, one of which comes late to each collective."""

    def write(made, late=None, **job):
        files = []
        for rank in range(3):

            def inside(begin, rank=rank):
                number = round(begin / STEP_MS)
                comes = begin + 2 + number % 7 / 10 + rank / 50 + (LATE_MS if rank == late else 0)
                return made(rank, number, comes, begin + 8 + number % 5 / 10 + rank / 100)

            info = {"distributedInfo": {"rank": rank, **GROUPS, **job}}
            files.append(str(kineto(tmp_path / f"{rank}.json", STEPS, inside, **info)))
        return files

    return write


def stragglers(found):
    return [each.ranks for each in found.faults if each.verdict == "straggler"]


@pytest.mark.parametrize("made", [gloo, nccl])
@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_the_late_rank(tmp_path, ranks, made, late):
    """The rank that comes late is found, and none where none does, in the files and in the merged one of gloo."""
    files = ranks(made, late)
    expected = [] if late is None else [(f"rank {late}",)]
    assert stragglers(otp.explain(*files)) == expected
    assert len(merge(files, str(tmp_path / "all.json")).ranks) == 2
    if made is gloo:
        assert stragglers(otp.explain(tmp_path / "all.json")) == expected


def test_the_ranks_of_a_folder(tmp_path, ranks):
    """Loaded ranks are explained as their files are; the file that they were merged into may lie beside them."""
    files = ranks(gloo, 2)
    merge(files, str(tmp_path / "all.json"))
    loaded = otp.load_ranks(tmp_path)
    assert list(loaded) == [0, 1, 2]
    with pytest.raises(otp.TorchProfError, match=r"all\.json' does not say of which rank it is"):
        otp.load_ranks([*files, tmp_path / "all.json"])
    (tmp_path / "merged").mkdir()
    (tmp_path / "all.json").rename(tmp_path / "merged" / "all.json")
    with pytest.raises(otp.TorchProfError, match="has merged traces only"):
        otp.load_ranks(tmp_path / "merged")
    found = loaded.explain()
    assert stragglers(found) == [("rank 2",)]
    assert found == otp.explain(*files)


def test_a_recording_that_began_earlier(ranks):
    """Numbers of torch are those of the group, whatever the numbers of the steps are."""
    files = ranks(lambda rank, number, *times: nccl(rank, number + 1000, *times), 1)
    assert stragglers(otp.explain(*files)) == [("rank 1",)]


@pytest.mark.parametrize(
    "job",
    [
        {"pg_config": [{"pg_size": 3}, {"pg_size": 2}]},
        {"pg_config": None, "pg_count": 2},
        {"pg_config": [7]},
    ],
)
def test_groups_of_some_ranks(tmp_path, ranks, job):
    """Calls of gloo do not name their group: without the same ranks in all groups nothing is compared, which is said."""
    files = ranks(gloo, 1, **job)
    found = otp.explain(*files)
    assert stragglers(found) == []
    assert "each group has all ranks" in found.abstentions[-1].way_out
    with pytest.raises(otp.TorchProfError, match=r"0 collectives .*each group has all ranks can be aligned"):
        merge(files, str(tmp_path / "all.json"))


def test_steps_of_other_numbers(tmp_path, ranks):
    """A rank whose profiler counts from a later step is not aligned by one step more, as its clock would be."""
    files = ranks(gloo, 1)
    text = (tmp_path / "2.json").read_text()
    for number in range(STEPS):
        text = text.replace(f'"ProfilerStep#{number}"', f'"ProfilerStep#{number + 1}."')
    (tmp_path / "2.json").write_text(text.replace('."', '"'))
    found = otp.explain(*files)
    assert stragglers(found) == []
    assert "more than half a step" in found.abstentions[-1].reason
    with pytest.raises(otp.TorchProfError, match=r"more than half of the 10\.0ms from one step"):
        merge(files, str(tmp_path / "all.json"))


def test_steps_with_other_collectives(tmp_path, ranks):
    """A step whose collectives differ on one rank is compared on none."""

    def made(rank, number, begin, end):
        return gloo(rank, number, begin, end) + (gloo(rank, number, end, end + 1) if (rank, number) == (1, 30) else [])

    first, second = merge(ranks(made), str(tmp_path / "all.json")).ranks
    assert (f"by {STEPS - 1} collectives" in first, f"by {STEPS} collectives" in second) == (True, True)


def test_kernels_without_numbers(tmp_path, ranks):
    """Kernels without numbers are those of the calls, in their order."""
    files = ranks(lambda *call: nccl(*call, Seq=None), 0)
    for file in map(Path, files):
        file.write_text(file.read_text().replace('"Seq": null, ', ""))
    assert stragglers(otp.explain(*files)) == [("rank 0",)]


def test_a_number_that_is_none(ranks):
    """What cannot be read is not counted, and the message has its place."""
    found = otp.explain(*ranks(lambda *call: nccl(*call, Seq="x")))
    assert "Seq is 'x', expected a whole number, event " in found.problems[0]
