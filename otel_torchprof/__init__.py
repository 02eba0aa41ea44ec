"""See inside a PyTorch model with OpenTelemetry: operators and labels as spans, averages and Chrome traces.

A name's module is imported when the name is first asked for: the import of the package alone costs some milliseconds.
"""

import importlib
from typing import TYPE_CHECKING

# First: it says why an interpreter is refused, which numpy may crash in.
from ._native import python_sources as _python_sources  # noqa: F401

# isort: split
from ._sources.labels import (
    record_function,  # at once: in a compiled function torch looks for it without calling __getattr__
)
from .version import __version__

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver as ExecutionTraceObserver
    from torch.profiler import itt as itt

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
    from ._sources.ranges import emit_itt, emit_nvtx
    from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
    from .health import GpuHealth, Health, ProcessorHealth, ProfilerStats
else:
    _MODULES = {
        "._columns.frame_info": (
            "FunctionInfo",
            "ModuleInfo",
            "OptimizerInfo",
            "ParameterGroupInfo",
            "ParameterInfo",
            "TensorInfo",
        ),
        "._events.activities": ("ProfilerActivity", "kineto_available", "supported_activities"),
        "._events.event_metadata": ("EventMetadata",),
        "._events.event_names": ("StringTable", "demangle"),
        "._events.events": ("EventList",),
        "._events.function_event": ("DeviceType", "FormattedTimesMixin", "FunctionEvent", "Interval", "Kernel"),
        "._events.function_event_avg": ("FunctionEventAvg",),
        "._events.mem_records": ("MemRecordsAcc",),
        "._export.chrome": ("ChromeTraceExporter",),
        "._export.otlp": ("ExportStats", "OTLPExporter"),
        "._export.otlp_file": ("OTLPFileExporter",),
        "._instrument.instrumentor": ("TorchInstrumentor",),
        "._instrument.processor": ("TorchSpanProcessor",),
        "._instrument.step_contexts": ("rank_resource", "step_context"),
        "._instrument.streaming": ("stream",),
        "._metrics.gpu_polling": ("GpuMetrics",),
        "._profile.nvprof": ("EnforceUnique", "load_nvprof", "parse_nvprof_trace"),
        "._profile.profile": ("_KinetoProfile", "profile"),
        "._profile.steps": ("KinetoStepTracker",),
        "._profile.tensorboard": ("tensorboard_trace_handler",),
        "._sampling.cycles": ("ProfilerAction", "schedule"),
        "._sampling.span_policy": ("SpanPolicy",),
        "._sources.frame_filter": ("FrameFilter",),
        "._sources.function_labels": ("FunctionLabels", "label_functions"),
        "._sources.ranges": ("emit_itt", "emit_nvtx"),
        ".errors": ("ExportError", "NativeError", "TorchLibraryError", "TorchProfError"),
        ".health": ("GpuHealth", "Health", "ProcessorHealth", "ProfilerStats"),
    }
    _PLACES = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            from ._profile import torch_names

            return torch_names.__getattr__(name)
        globals()[name] = found = getattr(importlib.import_module(_PLACES[name], __name__), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PLACES})


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
