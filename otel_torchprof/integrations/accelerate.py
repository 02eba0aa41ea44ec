"""``AccelerateProfileKwargs``: profiles of this package from ``Accelerator.profile()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils import ProfileKwargs

if TYPE_CHECKING:
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's


@dataclass
class AccelerateProfileKwargs(ProfileKwargs):
    """Has ``Accelerator.profile()`` make an :class:`~otel_torchprof.profile`: ``Accelerator(kwargs_handlers=[AccelerateProfileKwargs()])``.

    All arguments are those of Accelerate's ``ProfileKwargs``, ``output_trace_dir`` among them, where the Chrome trace of each process goes::

        accelerator = Accelerator(kwargs_handlers=[AccelerateProfileKwargs(record_shapes=True)])
        with accelerator.profile() as prof:
            train()
        print(prof.key_averages().table())
    """

    @property  # type: ignore[misc]  # what is writable elsewhere
    def __class__(self) -> Any:
        """Accelerate knows by its very class what a handler is for, and refuses a subclass."""
        return ProfileKwargs

    def build(self) -> Profile:
        """The profile with these options, not started.

        Raises:
            ValueError: an activity or an option of the schedule is unknown.
        """
        from otel_torchprof._profile.profile import profile
        from otel_torchprof._sampling.cycles import schedule

        names = self.activities
        return profile(
            activities=None if names is None else [self._get_profiler_activity(name) for name in names],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
