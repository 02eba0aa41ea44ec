"""``AccelerateProfileKwargs``: makes ``Accelerator.profile()`` return profiles of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils import ProfileKwargs

if TYPE_CHECKING:
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's


@dataclass
class AccelerateProfileKwargs(ProfileKwargs):
    """Makes ``Accelerator.profile()`` return a :class:`~otel_torchprof.profile`.

    The arguments are those of Accelerate's ``ProfileKwargs``, including ``output_trace_dir``, the folder for the Chrome
    trace of each process::

        accelerator = Accelerator(kwargs_handlers=[AccelerateProfileKwargs(record_shapes=True)])
        with accelerator.profile() as prof:
            train()
        print(prof.key_averages().table())

    Examples:
        >>> from otel_torchprof.integrations import AccelerateProfileKwargs
        >>> AccelerateProfileKwargs(record_shapes=True).build()
        <unfinished otel_torchprof.profile>
    """

    @property  # type: ignore[misc]  # writable in the base
    def __class__(self) -> Any:
        """Returns ProfileKwargs: Accelerate checks the exact class of a handler and refuses a subclass."""
        return ProfileKwargs

    def build(self) -> Profile:
        """Returns a profile with these options, not started.

        Raises:
            ValueError: an activity or an option of the schedule is unknown.
        """
        from otel_torchprof._export.cycles import schedule
        from otel_torchprof._profile.profile import profile

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
