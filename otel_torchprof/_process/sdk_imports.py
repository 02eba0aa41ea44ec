"""Handles environment variables with bad values that make OpenTelemetry raise at its import, or at the access to a provider.

Importing this module imports the OpenTelemetry modules that read such a variable, if it is set. A refused value gives a
warning and counts as not set.
"""

from __future__ import annotations

import importlib
import os

from otel_torchprof.errors import warn_once

_READERS = {
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "opentelemetry.sdk.trace",
    "OTEL_PROPAGATORS": "opentelemetry.propagate",
}
_PROVIDERS = {
    "OTEL_PYTHON_TRACER_PROVIDER": "opentelemetry_tracer_provider",
    "OTEL_PYTHON_METER_PROVIDER": "opentelemetry_meter_provider",
}
UNSET: dict[str, str] = {}
"""Former values of variables that were unset, since OpenTelemetry reads them at each use."""


def _import(module: str, variable: str) -> None:
    try:
        importlib.import_module(module)
    except ValueError as error:
        value = os.environ.pop(variable)
        try:
            importlib.import_module(module)
        finally:
            os.environ[variable] = value
        warn_once(f"{variable}={value!r} is ignored: {error}")


for _variable, _module in _READERS.items():
    if _variable in os.environ:
        _import(_module, _variable)
for _variable, _group in _PROVIDERS.items():
    _name = os.environ.get(_variable)
    if _name is not None and not importlib.import_module("importlib.metadata").entry_points(group=_group, name=_name):
        UNSET[_variable] = os.environ.pop(_variable)
        warn_once(f"{_variable}={_name!r} is ignored: no installed package has a provider of that name")
