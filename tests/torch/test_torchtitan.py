"""torchtitan's profiler with profiles of this package: its real class around a loop of our own, since its trainer needs a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("torchtitan.tools.profiler", reason="torchtitan is not installed", exc_type=ImportError)

from otel_torchprof.integrations import TorchTitanProfiler  # noqa: E402


def run(config, tmp_path, steps, **options):
    """A loop with the profiler, and the files that it has written."""
    with TorchTitanProfiler(config, base_folder=str(tmp_path), **options) as profiler:
        for _ in range(steps):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
    return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())


def test_traces_are_where_torchtitan_puts_them(tmp_path):
    """A cycle's trace is in the folder of the step that it ends with, counted from the step at which the loop begins."""
    config = TorchTitanProfiler.Config(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=1)
    (path,) = run(config, tmp_path, 4, global_step=100)
    assert path == "profiling/traces/iteration_104/rank0_trace.json.gz"


def test_nothing_is_done_unless_it_is_enabled(tmp_path):
    """Without enable_profiling there is no profile."""
    assert run(TorchTitanProfiler.Config(), tmp_path, 2) == []


def test_a_cycle_has_to_fit(tmp_path):
    """A frequency below the steps of one cycle is refused, with both numbers."""
    config = TorchTitanProfiler.Config(enable_profiling=True, profile_freq=2)
    with pytest.raises(ValueError, match="profile_freq is 2"):
        run(config, tmp_path, 1)
