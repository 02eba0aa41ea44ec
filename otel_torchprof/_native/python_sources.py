"""The sources of events that need Python's API, as other folders use them; ``_python.pyi`` has what each does."""

from __future__ import annotations

from .ffi import Label, python_sources

__all__ = [
    "Label",
    "errors",
    "follow_modules",
    "leave_modules",
    "module_begin",
    "module_end",
    "set_context_resolver",
    "show_labels",
    "traced",
]

errors = python_sources.errors
follow_modules = python_sources.follow_modules
leave_modules = python_sources.leave_modules
module_begin = python_sources.module_begin
module_end = python_sources.module_end
set_context_resolver = python_sources.set_context_resolver
show_labels = python_sources.show_labels
traced = python_sources.traced
