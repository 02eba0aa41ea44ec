"""OpenTelemetry instrumentation and profiler for PyTorch: operators and labels as spans, averages and Chrome traces."""

from typing import TYPE_CHECKING

# First: it reports why an interpreter is refused, in which numpy may crash.
from ._native import python_sources as _python_sources  # noqa: F401

# isort: split
# Second: a value that OpenTelemetry refuses while it is imported would end the program.
from ._process import sdk_imports as _sdk_imports  # noqa: F401

# isort: split
# Third: callbacks at forks and exits keep their order, whatever the order of imports.
from ._process import process_changes as _process_changes

# isort: split
from ._record.labels import record_function
from ._record.ranges import emit_itt, emit_nvtx
from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
from .version import __version__

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver as ExecutionTraceObserver
    from torch.profiler import itt as itt

    from ._answers.diff import diff
    from ._answers.difference import Difference
    from ._answers.explanation import Explanation
    from ._answers.verdicts import explain
    from ._cli.notebook import load_ipython_extension as load_ipython_extension
    from ._columns.frame_info import (
        FunctionInfo,
        ModuleInfo,
        OptimizerInfo,
        ParameterGroupInfo,
        ParameterInfo,
        TensorInfo,
    )
    from ._export.chrome import ChromeTraceExporter
    from ._export.cycles import ProfilerAction, schedule
    from ._export.otlp import ExportStats, OTLPExporter
    from ._export.otlp_file import OTLPFileExporter
    from ._export.span_policy import SpanPolicy
    from ._instrument.gpu_metrics import GpuMetrics
    from ._instrument.instrumentor import TorchInstrumentor
    from ._instrument.processor import TorchSpanProcessor
    from ._instrument.step_contexts import rank_resource, step_context
    from ._instrument.streaming import stream
    from ._profile.events import EventList
    from ._profile.function_event import (
        DeviceType,
        EventMetadata,
        FormattedTimesMixin,
        FunctionEvent,
        Interval,
        Kernel,
        StringTable,
        demangle,
    )
    from ._profile.function_event_avg import FunctionEventAvg
    from ._profile.kineto_event import MemRecordsAcc, ProfilerActivity, kineto_available, supported_activities
    from ._profile.loaded import LoadedProfile, load
    from ._profile.loaded_ranks import LoadedRanks, load_ranks
    from ._profile.nvprof import EnforceUnique, load_nvprof, parse_nvprof_trace
    from ._profile.profile import _KinetoProfile as _KinetoProfile
    from ._profile.profile import profile
    from ._profile.steps import KinetoStepTracker
    from ._profile.tensorboard import tensorboard_trace_handler
    from ._record.batches import Ticket, batch, enqueue
    from ._record.carrying import carry
    from ._record.frame_filter import FrameFilter
    from ._record.function_labels import FunctionLabels, label_functions
    from .health import GpuHealth, Health, ProcessorHealth, ProfilerStats
else:
    from ._profile import torch_names as _torch_names

    _MODULES = {
        "ChromeTraceExporter": "_export.chrome",
        "DeviceType": "_profile.function_event",
        "Difference": "_answers.difference",
        "EnforceUnique": "_profile.nvprof",
        "EventList": "_profile.events",
        "EventMetadata": "_profile.function_event",
        "Explanation": "_answers.explanation",
        "ExportStats": "_export.otlp",
        "FormattedTimesMixin": "_profile.function_event",
        "FrameFilter": "_record.frame_filter",
        "FunctionEvent": "_profile.function_event",
        "FunctionEventAvg": "_profile.function_event_avg",
        "FunctionInfo": "_columns.frame_info",
        "FunctionLabels": "_record.function_labels",
        "GpuHealth": "health",
        "GpuMetrics": "_instrument.gpu_metrics",
        "Health": "health",
        "Interval": "_profile.function_event",
        "Kernel": "_profile.function_event",
        "KinetoStepTracker": "_profile.steps",
        "LoadedProfile": "_profile.loaded",
        "LoadedRanks": "_profile.loaded_ranks",
        "MemRecordsAcc": "_profile.kineto_event",
        "ModuleInfo": "_columns.frame_info",
        "OTLPExporter": "_export.otlp",
        "OTLPFileExporter": "_export.otlp_file",
        "OptimizerInfo": "_columns.frame_info",
        "ParameterGroupInfo": "_columns.frame_info",
        "ParameterInfo": "_columns.frame_info",
        "ProcessorHealth": "health",
        "ProfilerAction": "_export.cycles",
        "ProfilerActivity": "_profile.kineto_event",
        "ProfilerStats": "health",
        "SpanPolicy": "_export.span_policy",
        "StringTable": "_profile.function_event",
        "TensorInfo": "_columns.frame_info",
        "Ticket": "_record.batches",
        "TorchInstrumentor": "_instrument.instrumentor",
        "TorchSpanProcessor": "_instrument.processor",
        "_KinetoProfile": "_profile.profile",
        "batch": "_record.batches",
        "carry": "_record.carrying",
        "demangle": "_profile.function_event",
        "diff": "_answers.diff",
        "enqueue": "_record.batches",
        "explain": "_answers.verdicts",
        "kineto_available": "_profile.kineto_event",
        "label_functions": "_record.function_labels",
        "load": "_profile.loaded",
        "load_ipython_extension": "_cli.notebook",
        "load_nvprof": "_profile.nvprof",
        "load_ranks": "_profile.loaded_ranks",
        "parse_nvprof_trace": "_profile.nvprof",
        "profile": "_profile.profile",
        "rank_resource": "_instrument.step_contexts",
        "schedule": "_export.cycles",
        "step_context": "_instrument.step_contexts",
        "stream": "_instrument.streaming",
        "supported_activities": "_profile.kineto_event",
        "tensorboard_trace_handler": "_profile.tensorboard",
    }
    """Modules of the names that are imported on first access: nearly all of the package. Labels and ranges are not: dynamo reads them in
    the namespace itself."""

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            return _torch_names.__getattr__(name)
        globals()[name] = value = getattr(_process_changes.imported(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return [*{*globals(), *_MODULES}]


__all__ = [
    "ChromeTraceExporter",
    "DeviceType",
    "Difference",
    "EnforceUnique",
    "EventList",
    "EventMetadata",
    "Explanation",
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
    "LoadedProfile",
    "LoadedRanks",
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
    "Ticket",
    "TorchInstrumentor",
    "TorchLibraryError",
    "TorchProfError",
    "TorchSpanProcessor",
    "__version__",
    "batch",
    "carry",
    "demangle",
    "diff",
    "emit_itt",
    "emit_nvtx",
    "enqueue",
    "explain",
    "kineto_available",
    "label_functions",
    "load",
    "load_nvprof",
    "load_ranks",
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
