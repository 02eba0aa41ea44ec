"""See inside a PyTorch model with OpenTelemetry: operators and labels as spans, averages and Chrome traces."""

from typing import TYPE_CHECKING

# First: it says why an interpreter is refused, which numpy may crash in.
from ._native import python_sources as _python_sources  # noqa: F401

# isort: split
from ._columns.frame_info import (
    FunctionInfo,
    ModuleInfo,
    OptimizerInfo,
    ParameterGroupInfo,
    ParameterInfo,
    TensorInfo,
)
from ._events.activities import ProfilerActivity, kineto_available, supported_activities
from ._events.event_metadata import EventMetadata
from ._events.event_names import StringTable, demangle
from ._events.events import EventList
from ._events.function_event import DeviceType, FormattedTimesMixin, FunctionEvent, Interval, Kernel
from ._events.function_event_avg import FunctionEventAvg
from ._events.mem_records import MemRecordsAcc
from ._export.chrome import ChromeTraceExporter
from ._export.otlp import ExportStats, OTLPExporter
from ._export.otlp_file import OTLPFileExporter
from ._instrument.instrumentor import TorchInstrumentor
from ._instrument.processor import TorchSpanProcessor
from ._instrument.step_contexts import rank_resource, step_context
from ._instrument.streaming import stream
from ._metrics.gpu_polling import GpuMetrics
from ._profile.nvprof import EnforceUnique, load_nvprof, parse_nvprof_trace
from ._profile.profile import _KinetoProfile as _KinetoProfile
from ._profile.profile import profile
from ._profile.steps import KinetoStepTracker
from ._profile.tensorboard import tensorboard_trace_handler
from ._sampling.cycles import ProfilerAction, schedule
from ._sampling.span_policy import SpanPolicy
from ._sources.frame_filter import FrameFilter
from ._sources.function_labels import FunctionLabels, label_functions
from ._sources.labels import record_function
from ._sources.ranges import emit_itt, emit_nvtx
from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
from .health import GpuHealth, Health, ProcessorHealth, ProfilerStats
from .version import __version__

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver as ExecutionTraceObserver
    from torch.profiler import itt as itt
else:
    from ._profile.torch_names import __getattr__  # noqa: F401 - Python calls it

__all__ = [
    "ChromeTraceExporter",
    "DeviceType",
    "EnforceUnique",
    "EventList",
    "EventMetadata",
    "ExportError",
    "ExportStats",
    "FormattedTimesMixin",
    "FrameFilter",
    "FunctionEvent",
    "FunctionEventAvg",
    "FunctionInfo",
    "FunctionLabels",
    "GpuHealth",
    "GpuMetrics",
    "Health",
    "Interval",
    "Kernel",
    "KinetoStepTracker",
    "MemRecordsAcc",
    "ModuleInfo",
    "NativeError",
    "OTLPExporter",
    "OTLPFileExporter",
    "OptimizerInfo",
    "ParameterGroupInfo",
    "ParameterInfo",
    "ProcessorHealth",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerStats",
    "SpanPolicy",
    "StringTable",
    "TensorInfo",
    "TorchInstrumentor",
    "TorchLibraryError",
    "TorchProfError",
    "TorchSpanProcessor",
    "__version__",
    "demangle",
    "emit_itt",
    "emit_nvtx",
    "kineto_available",
    "label_functions",
    "load_nvprof",
    "parse_nvprof_trace",
    "profile",
    "rank_resource",
    "record_function",
    "schedule",
    "step_context",
    "stream",
    "supported_activities",
    "tensorboard_trace_handler",
]
