"""The sources of events that need Python's API, as other folders use them; ``_python.pyi`` has what each does."""

from __future__ import annotations

from .ffi import Label, python_sources

__all__ = [
    "Label",
    "errors",
    "follow_calls",
    "follow_compiler",
    "follow_modules",
    "follow_phases",
    "generate_begin",
    "generate_end",
    "generation",
    "in_graph",
    "in_phase",
    "leave_modules",
    "optimizer_begin",
    "optimizer_end",
    "phase_begin",
    "phase_collection",
    "phase_end",
    "set_context_resolver",
    "show_labels",
    "traced",
    "usage_at",
    "usage_now",
]

errors = python_sources.errors
follow_calls = python_sources.follow_calls
follow_compiler = python_sources.follow_compiler
follow_modules = python_sources.follow_modules
follow_phases = python_sources.follow_phases
generate_begin = python_sources.generate_begin
generate_end = python_sources.generate_end
generation = python_sources.generation
in_graph = python_sources.in_graph
in_phase = python_sources.in_phase
leave_modules = python_sources.leave_modules
optimizer_begin = python_sources.optimizer_begin
optimizer_end = python_sources.optimizer_end
phase_begin = python_sources.phase_begin
phase_collection = python_sources.phase_collection
phase_end = python_sources.phase_end
set_context_resolver = python_sources.set_context_resolver
show_labels = python_sources.show_labels
traced = python_sources.traced
usage_at = python_sources.usage_at
usage_now = python_sources.usage_now
