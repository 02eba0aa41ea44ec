"""See inside a PyTorch model with OpenTelemetry: operators and labels as spans, averages and Chrome traces."""

from typing import TYPE_CHECKING

from ._columns.frame_facts import (
    FunctionFacts,
    ModuleFacts,
    OptimizerFacts,
    ParameterFacts,
    ParameterGroupFacts,
    TensorFacts,
)
from ._cycles import ProfilerAction, schedule
from ._export.chrome import ChromeTraceExporter
from ._export.otlp import ExportStats, OTLPExporter
from ._export.otlp_file import OTLPFileExporter
from ._native import ffi as _ffi  # noqa: F401 - first: it says why an interpreter is refused, which numpy may crash in
from ._tensorboard import tensorboard_trace_handler
from .activities import ProfilerActivity, kineto_available, supported_activities
from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
from .event_metadata import EventMetadata
from .event_names import StringTable, demangle
from .events import EventList
from .frame_filter import FrameFilter
from .function_event import DeviceType, FormattedTimesMixin, FunctionEvent, Interval, Kernel
from .function_event_avg import FunctionEventAvg
from .function_labels import FunctionLabels, label_functions
from .health import GpuHealth, Health, ProcessorHealth, ProfilerStats
from .instrumentor import TorchInstrumentor
from .labels import record_function
from .mem_records import MemRecordsAcc
from .metrics import GpuMetrics
from .nvprof import EnforceUnique, load_nvprof, parse_nvprof_trace
from .processor import TorchSpanProcessor
from .profiler import _KinetoProfile as _KinetoProfile
from .profiler import profile
from .ranges import emit_itt, emit_nvtx
from .ranks import rank_resource, step_context
from .span_policy import SpanPolicy
from .steps import KinetoStepTracker
from .streaming import stream
from .version import __version__

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver as ExecutionTraceObserver
    from torch.profiler import itt as itt
else:
    from ._torch_names import __getattr__  # noqa: F401 - Python calls it

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
    "FunctionFacts",
    "FunctionLabels",
    "GpuHealth",
    "GpuMetrics",
    "Health",
    "Interval",
    "Kernel",
    "KinetoStepTracker",
    "MemRecordsAcc",
    "ModuleFacts",
    "NativeError",
    "OTLPExporter",
    "OTLPFileExporter",
    "OptimizerFacts",
    "ParameterFacts",
    "ParameterGroupFacts",
    "ProcessorHealth",
    "ProfilerAction",
    "ProfilerActivity",
    "ProfilerStats",
    "SpanPolicy",
    "StringTable",
    "TensorFacts",
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
