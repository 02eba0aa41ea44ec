"""Adapters for training frameworks, one line in the program each; ``docs/training.md`` is the guide.

- ``HuggingFaceCallback``: ``transformers.Trainer(..., callbacks=[HuggingFaceCallback()])``
- ``LightningProfiler``: ``lightning.Trainer(profiler=LightningProfiler())``, also of ``pytorch_lightning``
- ``AccelerateProfileKwargs``: ``Accelerator(kwargs_handlers=[AccelerateProfileKwargs()])``
- ``TorchTitanProfiler``: a ``torchtitan.tools.profiler.Profiler`` with traces of this package

A framework is imported on the first access to its adapter.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accelerate import AccelerateProfileKwargs
    from .huggingface import HuggingFaceCallback
    from .lightning import LightningProfiler
    from .torchtitan import TorchTitanProfiler
else:
    _MODULES = {
        "AccelerateProfileKwargs": "accelerate",
        "HuggingFaceCallback": "huggingface",
        "LightningProfiler": "lightning",
        "TorchTitanProfiler": "torchtitan",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        extra = _MODULES[name]
        try:
            adapter = getattr(import_module(f"{__name__}.{extra}"), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith(__name__.partition(".")[0]):
                raise
            raise ImportError(
                f"{name} needs {error.name}, which is not installed: pip install 'otel-torchprof[{extra}]'"
            ) from error
        globals()[name] = adapter
        return adapter

    def __dir__() -> list[str]:
        return [*globals(), *_MODULES]


__all__ = ["AccelerateProfileKwargs", "HuggingFaceCallback", "LightningProfiler", "TorchTitanProfiler"]
