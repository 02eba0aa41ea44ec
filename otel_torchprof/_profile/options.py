"""The arguments of ``profile``, checked and brought into one form: those of both of torch's classes of that name."""

from __future__ import annotations

import collections.abc
import copy
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._native import torch_library
from otel_torchprof._process.torch_differences import differences
from otel_torchprof._record.device_source import is_capturing
from otel_torchprof.errors import warn_caller, warn_once
from otel_torchprof.health import NO_DEVICE

from .kineto_event import ProfilerActivity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_logger = logging.getLogger("otel_torchprof")

_DEVICES = {
    "cuda": ProfilerActivity.CUDA,
    "xpu": ProfilerActivity.XPU,
    "mtia": ProfilerActivity.MTIA,
    "hpu": ProfilerActivity.HPU,
}
"""Torch's devices by the names that ``use_device`` takes, in the order in which activities are looked at."""

_CONFIG_STATE = (
    "profiler_metrics",
    "profiler_measure_per_kernel",
    "verbose",
    "performance_events",
    "enable_cuda_sync_events",
    "adjust_profiler_step",
    "disable_external_correlation",
    "profile_all_threads",
    "capture_overload_names",
    "record_python_gc_info",
    "expose_kineto_event_metadata",
    "custom_profiler_config",
    "adjust_timestamps",
    "trace_only",
)
"""What a torch ``_ExperimentalConfig`` pickles, in its order: most of it cannot be read in any other way."""

_CONFIG_MEANS = frozenset(
    ("verbose", "profile_all_threads", "capture_overload_names", "record_python_gc_info", "trace_only")
)
"""What of it means something here; ``verbose`` asks for stacks on events, which ``with_stack`` always gives."""

CPU_ACTIVITY_TYPES = frozenset(("CPU_OP", "USER_ANNOTATION", "CPU_INSTANT_EVENT", "PYTHON_FUNCTION"))
"""Names of what a filter of the CPU's group can choose among here."""


def privateuse1_name() -> str:
    """The name of the backend that is registered with torch as PrivateUse1."""
    if torch_library.installed_torch() is None:
        return "privateuseone"
    from torch._C import _get_privateuse1_backend_name as name

    return str(name())


# --- activities ---


class Activities(NamedTuple):
    """What is to be collected."""

    activities: frozenset[ProfilerActivity]
    filters: Mapping[ProfilerActivity, set[str]]
    """By group, what of it is wanted only."""


def checked_activities(given: Iterable[Any], use_cuda: bool | None = None) -> Activities:
    """The groups among ``activities``, ours or torch's.

    Raises:
        AssertionError: nothing is left to collect.
        TypeError: no list, or an item is neither an activity nor a dictionary of them.
        ValueError: a group stands there twice.
    """
    if isinstance(given, str) or not isinstance(given, collections.abc.Iterable):
        raise TypeError(f"activities is {given!r}; it must be a list of ProfilerActivity values")
    items = list(given)
    keys = [key for item in items for key in (item if isinstance(item, dict) else (item,))]
    named = {activity for activity in map(as_activity, keys) if activity is not None}
    if use_cuda is not None:
        named = named | {ProfilerActivity.CUDA} if use_cuda else named - {ProfilerActivity.CUDA}
    if not named and not differences().names_wrong_activities:
        raise AssertionError("No valid profiler activities found")
    found: set[ProfilerActivity] = set()
    for key in keys:
        activity = as_activity(key)
        if activity is None:
            raise TypeError(f"Expected ProfilerActivity or dict, got {type(key)}")
        if activity in found:
            raise ValueError(f"Activity {activity} specified more than once")
        found.add(activity)
    if not found:
        raise AssertionError("No valid profiler activities found")
    filters = {key: types for item in items if isinstance(item, dict) for key, types in item.items()}
    return Activities(frozenset(found), checked_filters(filters))


def checked_filters(given: Mapping[Any, Iterable[str]] | None) -> dict[ProfilerActivity, set[str]]:
    """What of some groups is wanted only, by group.

    Raises:
        RuntimeError: a name that is no activity type of the CPU's group, as torch's.
        TypeError: no dictionary, a key that is no activity, or types that are no list.
    """
    if given is not None and not isinstance(given, collections.abc.Mapping):
        raise TypeError(
            f"activity_filters is {given!r}; it must be a dictionary from ProfilerActivity to activity types"
        )
    filters = {}
    for key, types in (given or {}).items():
        activity = as_activity(key)
        if activity is None:
            raise TypeError(f"Expected ProfilerActivity or dict, got {type(key)}")
        if not isinstance(types, collections.abc.Iterable) or isinstance(types, str):
            raise TypeError(f"the filter of {activity} is {types!r}; it must be a list of names of activity types")
        filters[activity] = set(types)
    for unknown in sorted(filters.get(ProfilerActivity.CPU, set()) - CPU_ACTIVITY_TYPES):
        raise RuntimeError(f"Unknown or non-member activity type name: '{unknown}'")
    return filters


def as_activity(item: Any) -> ProfilerActivity | None:
    """Ours, of torch's or ours; None of anything else."""
    return ProfilerActivity(int(item)) if type(item).__name__ == "ProfilerActivity" else None


def device_of(activities: frozenset[ProfilerActivity]) -> str | None:
    """The one device that torch takes from several groups."""
    for name, activity in _DEVICES.items():
        if activity in activities:
            return name
    return privateuse1_name() if ProfilerActivity.PrivateUse1 in activities else None


class Choice(NamedTuple):
    """What a profile is for."""

    activities: frozenset[ProfilerActivity]
    """As it was asked for."""
    filters: Mapping[ProfilerActivity, set[str]]
    collected: frozenset[ProfilerActivity]
    """What of it can be had."""
    device: str | None
    kind: str
    """Torch's name of the way to measure the device (``ProfilerState``)."""
    untimed: str
    """Where there is no device, why."""


def checked_choice(
    *,
    activities: Iterable[Any] | None,
    activity_filters: Mapping[Any, Iterable[str]] | None,
    use_device: str | None,
    use_cuda: bool | None,
    use_cpu: bool,
    use_kineto: bool,
    as_torch_profiler: bool,
) -> Choice:
    """The arguments with which torch's two classes choose what is collected, as one.

    ``as_torch_profiler``: other arguments are those of torch.profiler's class.

    Raises:
        AssertionError, RuntimeError, TypeError, ValueError: torch's own, with torch's texts.
    """
    as_torch_profiler = as_torch_profiler or activities is not None
    _say_that_use_cuda_is_deprecated(use_cuda, as_torch_profiler=as_torch_profiler)
    if use_kineto:
        warn_once("use_kineto is accepted as torch has it; nothing here is recorded by Kineto")
    filters = checked_filters(activity_filters)
    if activities is None:
        requested = "cuda" if use_cuda and not as_torch_profiler else use_device
        device = checked_device(requested, use_cpu=use_cpu, use_kineto=use_kineto)
        return Choice(device.activities, filters, device.activities, device.name, device.kind, _why_none(requested))
    asked = checked_activities(activities, use_cuda)
    use_cpu = use_cpu and ProfilerActivity.CPU in asked.activities
    requested = use_device or device_of(asked.activities)
    device = checked_device(requested, use_cpu=use_cpu, use_kineto=True)
    kept = {**filters, **asked.filters}
    return Choice(asked.activities, kept, device.activities, device.name, device.kind, _why_none(requested))


def _why_none(requested: str | None) -> str:
    return NO_DEVICE if requested is None else f"there is no {requested} here that torch can use"


def check_timeout(seconds: float | None) -> None:
    """Raises ValueError for a negative number of seconds, as torch, and TypeError for what is no number."""
    if seconds is None:
        return
    if not isinstance(seconds, int | float):
        raise TypeError(f"post_processing_timeout_s is {seconds!r}; it must be a number of seconds, or None")
    if seconds < 0:
        raise ValueError("post_processing_timeout_s must be non-negative")
    warn_once("post_processing_timeout_s is accepted as torch has it; nothing here takes so long")


def check_calls(observer: Any, **functions: Any) -> None:
    """What will be called while the profile runs can be called: no mistake here ends a loop in its middle.

    Raises:
        TypeError: one of the functions, or a method of the execution trace observer, is none.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {function!r}; it must be a function, or None")
    methods = ("start", "stop", "cleanup")
    if observer is not None and not all(callable(getattr(observer, method, None)) for method in methods):
        raise TypeError(f"execution_trace_observer is {observer!r}; it must have the methods {', '.join(methods)}")


def observer_of_the_environment() -> Any:
    """Torch's execution trace observer, where the variable that torch.profiler looks at asks for one."""
    if os.environ.get("ENABLE_PYTORCH_EXECUTION_TRACE", "0") != "1" or torch_library.installed_torch() is None:
        return None
    from torch.profiler import ExecutionTraceObserver

    return ExecutionTraceObserver.build_execution_trace_obs_from_env()


# --- devices ---


class Device(NamedTuple):
    """The device that a profile is also for."""

    name: str | None
    """None: the CPU alone."""
    activities: frozenset[ProfilerActivity]
    """The groups that can be had."""
    kind: str
    """Torch's name of the way to measure it (``ProfilerState``)."""


def checked_device(requested: str | None, *, use_cpu: bool, use_kineto: bool) -> Device:
    """Which device can be had, with torch's warnings for one that cannot.

    Raises:
        AssertionError: torch's, where nothing is left to profile or the device wants another way to be profiled.
    """
    if not use_cpu and not use_kineto:
        raise AssertionError("Device-only events supported only with Kineto (use_kineto=True)")
    name = None if requested is None else _available(requested)
    supported = {ProfilerActivity.CPU} if name is None else _torchs_activities()
    activities = {ProfilerActivity.CPU} if use_cpu else set()
    kind = "KINETO"
    own = None if name is None else _DEVICES.get(name, ProfilerActivity.PrivateUse1)
    if own is not None and use_kineto and own in supported:
        activities.add(own)
    if name == "cuda" and own not in activities:
        if not use_cpu:
            raise AssertionError("Legacy CUDA profiling requires use_cpu=True")
        kind = "KINETO_GPU_FALLBACK"
    elif name in _DEVICES and own not in activities:
        raise AssertionError(
            f"Legacy {name.upper()} profiling is not supported. Requires use_kineto=True on {name.upper()} devices."
        )
    elif own == ProfilerActivity.PrivateUse1:
        if not use_kineto and not use_cpu:
            raise AssertionError("Legacy privateuse1 profiling requires use_cpu=True")
        kind = "KINETO_PRIVATEUSE1" if use_kineto else "KINETO_PRIVATEUSE1_FALLBACK"
    if not activities:
        raise AssertionError("No activities specified for the profiler")
    for activity in sorted(activities - {ProfilerActivity.CPU, own}):
        warn_once(f"activity {activity.name} is not recorded by this version: the profile has the CPU's events only")
    return Device(name, frozenset(activities), kind)


def _available(name: str) -> str | None:
    own = privateuse1_name()
    if name not in _DEVICES and (name != own or not _is_available(name)):
        warn_caller(f"The {name} is not a valid device option.")
        return None
    if name in {"cuda", "xpu", "hpu"} and not _is_available(name):
        warn_caller(f"{name.upper()} is not available, disabling {name.upper()} profiling")
        return None
    return name


def _is_available(name: str) -> bool:
    if torch_library.installed_torch() is None:
        return False
    import torch

    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def _torchs_activities() -> set[ProfilerActivity]:
    """What the torch that is installed can collect."""
    if torch_library.installed_torch() is None:
        return {ProfilerActivity.CPU}
    from torch.autograd import _supported_activities

    return {ProfilerActivity(int(activity)) for activity in _supported_activities()}


def synchronize(device: str | None) -> None:
    """Waits until a device has done what it was given, as torch does before it ends a profile.

    Not while a graph is being captured: CUDA forbids it, and the capture would be lost.
    """
    if device is None or is_capturing(device):
        return
    import torch

    wait = getattr(getattr(torch, device, None), "synchronize", None)
    if wait is not None:
        wait()


def _say_that_use_cuda_is_deprecated(use_cuda: bool | None, *, as_torch_profiler: bool) -> None:
    """Torch's two warnings: one of its classes has ``use_device`` in the place of ``use_cuda``, the other ``activities``.

    Raises:
        TypeError: the torch that is installed has the argument no longer.
    """
    if use_cuda is not None and not differences().takes_use_cuda:
        raise TypeError(
            "profile.__init__() got an unexpected keyword argument 'use_cuda': torch has it no longer since 2.14; say "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or use_device='cuda'"
        )
    if as_torch_profiler:
        if use_cuda is not None:
            warn_caller("`use_cuda` is deprecated, use `activities` argument instead", FutureWarning)
    elif use_cuda:
        text = "The attribute `use_cuda` will be deprecated soon, please use ``use_device = 'cuda'`` instead."
        warn_caller(text, FutureWarning)


# --- the experimental configuration ---


def checked_config(config: Any, *, with_stack: bool, with_modules: bool) -> Any:
    """The configuration as it is used: with stacks, events are wanted, so torch drops ``trace_only``.

    Raises:
        TypeError: it is none.
    """
    if with_modules and differences().warns_of_modules:
        warn_caller(
            "with_modules is deprecated and will be removed in a future release of torch, whose with_stack=True records modules "
            "too",
            FutureWarning,
        )
    if config is None:
        return None
    if not hasattr(config, "trace_only"):
        raise TypeError(
            f"experimental_config is {config!r}; it must be a torch._C._profiler._ExperimentalConfig, or None"
        )
    for name in sorted(set(_CONFIG_STATE) - _CONFIG_MEANS):
        if of_config(config, name):
            warn_once(f"experimental_config: {name} is accepted as torch has it; it has no meaning here")
    if of_config(config, "trace_only") and with_stack:
        warn_caller(
            "trace_only=True is incompatible with with_stack=True (stack traces require event post-processing). "
            "Disabling trace_only."
        )
        config = copy.copy(config)
        config.trace_only = False
    return config


def of_config(config: Any, name: str) -> Any:
    """One setting of a configuration; None where it has none of that name."""
    if config is None:
        return None
    value = getattr(config, name, None)
    if value is None and type(config).__name__ == "_ExperimentalConfig":
        value = dict(zip(_CONFIG_STATE, config.__getstate__(), strict=False)).get(name)
    return value


def torchs_state(prof: Any) -> Any:
    """Torch's ``ProfilerState`` of a profile."""
    from torch.autograd import ProfilerState

    return getattr(ProfilerState, prof._kind)  # noqa: SLF001 - of this package


def torchs_config(prof: Any) -> Any:
    """The options of a profile as torch's ``ProfilerConfig``."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig

    return ProfilerConfig(
        torchs_state(prof),
        prof.record_shapes or prof.with_flops,
        prof.profile_memory,
        prof.with_stack,
        prof.with_flops,
        prof.with_modules,
        prof.experimental_config or _ExperimentalConfig(),
        prof.trace_id,
    )
