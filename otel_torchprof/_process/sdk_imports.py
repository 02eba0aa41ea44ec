"""OpenTelemetry's modules that read a variable while they are imported, and raise where they do not like its value.

Importing this module imports them where their variable is set. A value that they refuse is warned of and counts as not set.
"""

from __future__ import annotations

import importlib
import os

from otel_torchprof import config

_READERS = {
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "opentelemetry.sdk.trace",
    "OTEL_PROPAGATORS": "opentelemetry.propagate",
}


def _import(module: str, variable: str) -> None:
    try:
        importlib.import_module(module)
    except ValueError as error:
        value = os.environ.pop(variable)
        try:
            importlib.import_module(module)
        finally:
            os.environ[variable] = value
        config.warn_once(f"{variable}={value!r} is ignored: {error}")


for _variable, _module in _READERS.items():
    if _variable in os.environ:
        _import(_module, _variable)
