"""``TorchTitanProfiler``: makes torchtitan's profiler write traces of this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.tools.profiler import PROFILE_FILE, PROFILE_ITER_DIR, Profiler

if TYPE_CHECKING:
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's


class TorchTitanProfiler(Profiler):
    """Writes the traces of torchtitan's ``Profiler`` with :class:`~otel_torchprof.profile`.

    Options and file names are those of torchtitan.

    Examples:
        >>> from otel_torchprof.integrations import TorchTitanProfiler
        >>> config = TorchTitanProfiler.Config(enable_profiling=True)  # profiler= in the trainer's configuration
    """

    def build_torch_profiler(self, *, global_step: int, base_folder: str, leaf_folder: str) -> Profile | None:
        """Returns a running profile; None if the configuration does not enable it.

        Raises:
            ValueError: ``profile_freq`` is too small for the steps of a cycle.
        """
        from otel_torchprof._export.cycles import schedule
        from otel_torchprof._profile.profile import profile

        config = self._config
        if not config.enable_profiling:
            return None
        given = {
            name: getattr(config, f"profiler_{name}", None) for name in ("repeat", "skip_first", "skip_first_wait")
        }
        wait = config.profile_freq - config.profiler_warmup - config.profiler_active
        if wait < 0:
            raise ValueError(
                f"profile_freq is {config.profile_freq}; it must be at least profiler_warmup + profiler_active, "
                f"{config.profiler_warmup + config.profiler_active}"
            )
        prof = profile(
            schedule=schedule(
                wait=wait,
                warmup=config.profiler_warmup,
                active=config.profiler_active,
                **{name: value for name, value in given.items() if value is not None},
            ),
            on_trace_ready=lambda ready: self._write(ready, Path(base_folder, config.save_traces_folder), leaf_folder),
            record_shapes=True,
        )
        prof.start()
        prof.step_num = global_step
        return prof

    def _write(self, prof: Any, folder: Path, leaf_folder: str) -> None:
        import torch

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        path = folder / PROFILE_ITER_DIR.format(step=prof.step_num) / leaf_folder / PROFILE_FILE.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        prof.export_chrome_trace(str(path))
        process = self._config.trace_post_processor
        if process is not None:
            process.build()(str(path))
