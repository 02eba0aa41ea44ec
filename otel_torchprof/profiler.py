"""The names of ``torch.profiler`` and ``torch.autograd.profiler``, for code that changes an import and nothing else."""

from typing import TYPE_CHECKING

from ._export.cycles import ProfilerAction, schedule
from ._profile.events import EventList
from ._profile.function_event import DeviceType, FunctionEvent
from ._profile.kineto_event import MemRecordsAcc, ProfilerActivity, kineto_available, supported_activities
from ._profile.nvprof import EnforceUnique, load_nvprof, parse_nvprof_trace
from ._profile.profile import _KinetoProfile, profile
from ._profile.steps import KinetoStepTracker
from ._profile.tensorboard import tensorboard_trace_handler
from ._record.frame_filter import FrameFilter
from ._record.labels import record_function
from ._record.ranges import emit_itt, emit_nvtx

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver as ExecutionTraceObserver  # noqa: PLC0414 - has it too
    from torch.profiler import itt as itt  # noqa: PLC0414 - has it too
else:
    from ._profile.torch_names import __getattr__  # noqa: F401 - Python calls it

__all__ = [
    "DeviceType",
    "EnforceUnique",
    "EventList",
    "FrameFilter",
    "FunctionEvent",
    "KinetoStepTracker",
    "MemRecordsAcc",
    "ProfilerAction",
    "ProfilerActivity",
    "_KinetoProfile",
    "emit_itt",
    "emit_nvtx",
    "kineto_available",
    "load_nvprof",
    "parse_nvprof_trace",
    "profile",
    "record_function",
    "schedule",
    "supported_activities",
    "tensorboard_trace_handler",
]
