"""See inside a PyTorch model with OpenTelemetry: operators and labels as spans, averages and Chrome traces."""

from .errors import ExportError, NativeError, TorchLibraryError, TorchProfError
from .events import EventList
from .function_event import FunctionEvent, Interval, Kernel
from .function_event_avg import FunctionEventAvg
from .health import Health
from .labels import record_function
from .profiler import profile
from .version import __version__

__all__ = [
    "EventList",
    "ExportError",
    "FunctionEvent",
    "FunctionEventAvg",
    "Health",
    "Interval",
    "Kernel",
    "NativeError",
    "TorchLibraryError",
    "TorchProfError",
    "__version__",
    "profile",
    "record_function",
]
