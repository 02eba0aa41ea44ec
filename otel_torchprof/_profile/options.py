"""Checks the arguments of ``profile``, which are those of torch's two classes of that name, and brings them into one form."""

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
"""Torch's devices by the names that ``use_device`` takes, in torch's order of preference."""

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
"""Fields of torch's ``_ExperimentalConfig`` in the order of its pickled state: most can be read in no other way."""

_CONFIG_MEANS = frozenset(
    ("verbose", "profile_all_threads", "capture_overload_names", "record_python_gc_info", "trace_only")
)
"""Fields that have an effect here; ``verbose`` requests stacks on events, which ``with_stack`` always records."""

CPU_ACTIVITY_TYPES = frozenset(("CPU_OP", "USER_ANNOTATION", "CPU_INSTANT_EVENT", "PYTHON_FUNCTION"))
"""Activity types that a filter of the CPU's group can select."""


def privateuse1_name() -> str:
    """The name of the backend that is registered with torch as PrivateUse1."""
    if torch_library.installed_torch() is None:
        return "privateuseone"
    from torch._C import _get_privateuse1_backend_name as name

    return str(name())


# --- activities ---


class Activities(NamedTuple):
    """Activity groups to collect."""

    activities: frozenset[ProfilerActivity]
    filters: Mapping[ProfilerActivity, set[str]]
    """By group, the only activity types to collect; a group without an entry is collected in full."""


def checked_activities(given: Iterable[Any], use_cuda: bool | None = None) -> Activities:
    """The groups and filters of an ``activities`` argument, with activities of this package or torch.

    Raises:
        AssertionError: nothing is left to collect.
        TypeError: it is no list, or an item is neither an activity nor a dictionary of them.
        ValueError: a group is named twice.
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
    activities: set[ProfilerActivity] = set()
    for key in keys:
        activity = as_activity(key)
        if activity is None:
            raise TypeError(f"Expected ProfilerActivity or dict, got {type(key)}")
        if activity in activities:
            raise ValueError(f"Activity {activity} specified more than once")
        activities.add(activity)
    if not activities:
        raise AssertionError("No valid profiler activities found")
    filters = {key: types for item in items if isinstance(item, dict) for key, types in item.items()}
    return Activities(frozenset(activities), checked_filters(filters))


def checked_filters(given: Mapping[Any, Iterable[str]] | None) -> dict[ProfilerActivity, set[str]]:
    """The requested activity types by group.

    Raises:
        RuntimeError: a name is no activity type of the CPU's group; torch's error.
        TypeError: it is no dictionary, a key is no activity, or its types are no list.
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
    """The activity as :class:`ProfilerActivity`, from one of this package or torch; None for anything else."""
    return ProfilerActivity(int(item)) if type(item).__name__ == "ProfilerActivity" else None


def device_of(activities: frozenset[ProfilerActivity]) -> str | None:
    """The device of the activity groups; of several, the one that torch prefers. None for the CPU alone."""
    for name, activity in _DEVICES.items():
        if activity in activities:
            return name
    return privateuse1_name() if ProfilerActivity.PrivateUse1 in activities else None


class Choice(NamedTuple):
    """The activities and the device of a profile."""

    activities: frozenset[ProfilerActivity]
    """Requested groups."""
    filters: Mapping[ProfilerActivity, set[str]]
    collected: frozenset[ProfilerActivity]
    """Groups that can be collected."""
    device: str | None
    kind: str
    """Name of torch's ``ProfilerState`` for the device."""
    untimed: str
    """Why no device is timed, if ``device`` is None."""


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
    """Checks the arguments with which torch's two classes select activities and device.

    ``as_torch_profiler``: other arguments are those of torch.profiler's class.

    Raises:
        AssertionError, RuntimeError, TypeError, ValueError: torch's errors, with torch's texts.
    """
    as_torch_profiler = as_torch_profiler or activities is not None
    _warn_of_use_cuda(use_cuda, as_torch_profiler=as_torch_profiler)
    if use_kineto:
        warn_once("use_kineto is accepted as torch has it; nothing here is recorded by Kineto")
    filters = checked_filters(activity_filters)
    if activities is None:
        requested = "cuda" if use_cuda and not as_torch_profiler else use_device
        device = checked_device(requested, use_cpu=use_cpu, use_kineto=use_kineto)
        return Choice(device.activities, filters, device.activities, device.name, device.kind, _why_none(requested))
    checked = checked_activities(activities, use_cuda)
    use_cpu = use_cpu and ProfilerActivity.CPU in checked.activities
    requested = use_device or device_of(checked.activities)
    device = checked_device(requested, use_cpu=use_cpu, use_kineto=True)
    all_filters = {**filters, **checked.filters}
    return Choice(checked.activities, all_filters, device.activities, device.name, device.kind, _why_none(requested))


def _why_none(requested: str | None) -> str:
    return NO_DEVICE if requested is None else f"there is no {requested} here that torch can use"


def check_timeout(seconds: float | None) -> None:
    """Raises ValueError for a negative number of seconds, as torch, and TypeError for anything but a number or None."""
    if seconds is None:
        return
    if not isinstance(seconds, int | float):
        raise TypeError(f"post_processing_timeout_s is {seconds!r}; it must be a number of seconds, or None")
    if seconds < 0:
        raise ValueError("post_processing_timeout_s must be non-negative")
    warn_once("post_processing_timeout_s is accepted as torch has it; nothing here takes so long")


def check_calls(observer: Any, **functions: Any) -> None:
    """Checks the functions that the profile calls later, so that a mistake raises now and not inside of a training loop.

    Raises:
        TypeError: one of them, or a method of the execution trace observer, is not callable.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {function!r}; it must be a function, or None")
    methods = ("start", "stop", "cleanup")
    if observer is not None and not all(callable(getattr(observer, method, None)) for method in methods):
        raise TypeError(f"execution_trace_observer is {observer!r}; it must have the methods {', '.join(methods)}")


def observer_of_the_environment() -> Any:
    """Torch's execution trace observer, if torch's variable ``ENABLE_PYTORCH_EXECUTION_TRACE`` requests one; else None."""
    if os.environ.get("ENABLE_PYTORCH_EXECUTION_TRACE", "0") != "1" or torch_library.installed_torch() is None:
        return None
    from torch.profiler import ExecutionTraceObserver

    return ExecutionTraceObserver.build_execution_trace_obs_from_env()


# --- devices ---


class Device(NamedTuple):
    """The device that a profile times."""

    name: str | None
    """None: the CPU alone."""
    activities: frozenset[ProfilerActivity]
    """Groups that can be collected."""
    kind: str
    """Name of torch's ``ProfilerState`` for the device."""


def checked_device(requested: str | None, *, use_cpu: bool, use_kineto: bool) -> Device:
    """Checks whether a device is available, with torch's warnings if it is not.

    Raises:
        AssertionError: nothing is left to profile, or the device cannot be profiled in this way; torch's error.
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
    """The activity groups that the installed torch can collect."""
    if torch_library.installed_torch() is None:
        return {ProfilerActivity.CPU}
    from torch.autograd import _supported_activities

    return {ProfilerActivity(int(activity)) for activity in _supported_activities()}


def synchronize(device: str | None) -> None:
    """Synchronizes with a device, as torch does before it ends a profile.

    Does nothing while a CUDA graph is being captured: CUDA forbids it then, and the capture would fail.
    """
    if device is None or is_capturing(device):
        return
    import torch

    wait = getattr(getattr(torch, device, None), "synchronize", None)
    if wait is not None:
        wait()


def _warn_of_use_cuda(use_cuda: bool | None, *, as_torch_profiler: bool) -> None:
    """Warns of ``use_cuda`` as torch's two classes do: one names ``use_device`` instead, the other ``activities``.

    Raises:
        TypeError: the installed torch no longer has the argument.
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
    """The configuration in use; ``trace_only`` is dropped with stacks, as in torch, since stacks need events.

    Raises:
        TypeError: it is no ``_ExperimentalConfig``.
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
    """The value of a field of a configuration; None if it has no such field."""
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
