"""See inside a PyTorch model with OpenTelemetry: operators and labels as spans, averages and Chrome traces."""

from ._export.chrome import ChromeTraceExporter
from ._export.otlp import ExportStats, OTLPExporter
from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
from .events import EventList
from .function_event import FunctionEvent, Interval, Kernel
from .function_event_avg import FunctionEventAvg
from .health import Health, ProcessorHealth
from .instrumentor import TorchInstrumentor
from .labels import record_function
from .processor import TorchSpanProcessor
from .profiler import profile
from .version import __version__

__all__ = [
    "ChromeTraceExporter",
    "EventList",
    "ExportError",
    "ExportStats",
    "FunctionEvent",
    "FunctionEventAvg",
    "Health",
    "Interval",
    "Kernel",
    "NativeError",
    "OTLPExporter",
    "ProcessorHealth",
    "TorchInstrumentor",
    "TorchLibraryError",
    "TorchProfError",
    "TorchSpanProcessor",
    "__version__",
    "profile",
    "record_function",
]
