"""``explain`` of traces of torch's own profiler: what names of slices prove, and devices."""

from __future__ import annotations

import pytest
from explained_files import kineto, piece

import otel_torchprof as otp


def verdicts(found):
    return [each.verdict for each in found.faults]


def of_torch(begin):
    """A step of 10 ms: 4 of the loader, 3 of backward on another thread, 1 of the optimizer, which is said twice."""
    return [
        piece("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, 4),
        piece("autograd::engine::evaluate_function: MmBackward0", begin + 5, 3, tid=2),
        piece("MmBackward0", begin + 5, 2.5, tid=2),
        piece("Optimizer.step#SGD.step", begin + 8, 1),
        piece("Optimizer.zero_grad#SGD.zero_grad", begin + 8.5, 0.5),
        piece("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin, 9, tid=3),
    ]


def test_phases_of_torchs_traces(tmp_path):
    """What names prove: waits of the loop's thread, backward on any, each moment once; the rest is not known."""
    found = otp.explain(kineto(tmp_path / "t.json", 60, of_torch))
    assert {row.phase: round(row.median * 1e3, 6) for row in found.phases} == {
        "data": 4.0,
        "backward": 3.0,
        "optimizer": 1.0,
        "not known": 2.0,
    }
    assert verdicts(found) == ["input-bound"]


@pytest.mark.parametrize(
    ("iterator", "said"), [("SingleProcess", "num_workers=0: "), ("MultiProcessing", "the loader has workers, ")]
)
def test_what_a_loader_has(tmp_path, iterator, said):
    """Whether a loader has workers is in the evidence: it is in the name of its iterator."""
    name = f"enumerate(DataLoader)#_{iterator}DataLoaderIter.__next__"
    [found] = otp.explain(kineto(tmp_path / "t.json", 60, lambda begin: [piece(name, begin, 5)])).faults
    assert [text.startswith(said) for text in found.evidence].count(True) == 1


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("Python GC", "gc-bound"),
        ("gc.collect: generation 2", "gc-bound"),
        ("Optimizer.step#AdamW.step", "optimizer-bound"),
        ("Optimizer.zero_grad#SGD.zero_grad", "optimizer-bound"),
        ("torch.phase.collective", "communication-bound"),
        ("torch.phase.nonsense", None),
    ],
)
def test_names_that_prove_a_phase(tmp_path, name, verdict):
    """Names that torch and this package give to what they do, whatever follows their fixed part."""
    found = otp.explain(kineto(tmp_path / "t.json", 60, lambda begin: [piece(name, begin, 5)]))
    assert verdicts(found) == ([verdict] if verdict else [])


def test_a_device_that_works(tmp_path):
    """With kernels, the device's time is what computes, and what the host launched is no verdict."""

    def on_device(begin):
        kernels = [piece("gemm", begin + 2 * n, 2, cat="kernel", pid=0, tid=7) for n in range(4)]
        return [piece("cudaLaunchKernel", begin, 1, cat="cuda_runtime"), piece("aten::sort", begin, 9), *kernels]

    found = otp.explain(kineto(tmp_path / "t.json", 60, on_device))
    assert [(each.verdict, round(each.share, 3)) for each in found.findings] == [("device-bound", 0.8)]


def test_a_device_without_times(tmp_path):
    """Launches without kernels: no verdict, and how to record them."""
    found = otp.explain(kineto(tmp_path / "t.json", 60, lambda begin: [piece("cudaLaunchKernel", begin, 9)]))
    assert found.headline.startswith("no verdict: work was launched on a device")


@pytest.mark.parametrize(
    ("name", "said"), [("aten::sort", ["operator-bound"]), ("aten::addmm", []), ("my label", []), ("c10d::barrier", [])]
)
def test_one_operator(tmp_path, name, said):
    """An operator that takes most of the step is named, but products of matrices, and labels, which are no operators."""
    found = otp.explain(
        kineto(tmp_path / "t.json", 60, lambda begin: [piece(name, begin, 9), piece("aten::x", begin, 1)])
    )
    assert verdicts(found) == said
