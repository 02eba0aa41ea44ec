"""The outputs of ``otel-torchprof run``: files, with the rank in their names if there are several ranks, and the receiver."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._export.file import check_writable
from otel_torchprof._export.file_exporter import PID, RANK, FileSpanExporter
from otel_torchprof._export.formats import TRACE_ENDINGS, TRACES, format_of
from otel_torchprof._export.sdk import takes_whole_traces
from otel_torchprof._export.span_policy import SpanPolicy, policy_without_code, schedule_of
from otel_torchprof._files.box_file import SUFFIX
from otel_torchprof._ranks.ranks import place_in, restart_in, role_in
from otel_torchprof.errors import TorchProfError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace.export import SpanExporter

    from otel_torchprof._ranks.ranks import Place

_TRACE = ".trace"
"""Stands before the suffix in default names."""
_RESTART = "restart"
_RECEIVER = "otlp"


def place_among_ranks(environ: Mapping[str, str]) -> Place | None:
    """The rank of this process, as its launcher says; None if it is the only one."""
    place = place_in(environ)
    return None if place is None or place.world_size == 1 else place


def name_of_rank(name: str, environ: Mapping[str, str]) -> str:
    """The file name of this rank: ``train.trace.json.gz`` becomes ``train.rank3.trace.json.gz``.

    torchrun's role, if it is not the default, and the number of restarts, if any, follow the rank:
    ``train.rank3.actor.restart1.trace.json.gz``. A name with ``{rank}``, and that of an only process, stays as it is.
    """
    place = place_among_ranks(environ)
    if place is None or RANK in name:
        return name
    parts = [f"rank{place.rank}"]
    if role := role_in(environ):
        parts.append(re.sub(r"[^\w-]", "_", role))
    if restart := restart_in(environ):
        parts.append(f"{_RESTART}{restart}")
    return name_with(name, parts)


def name_with(name: str, parts: Sequence[str]) -> str:
    """The file name with parts before its suffix: ``train.trace.json.gz`` becomes ``train.rank3.trace.json.gz``."""
    stem, suffix = _split(name)
    plain = stem.removesuffix(_TRACE)
    return f"{plain}.{'.'.join(parts)}{stem[len(plain) :]}{suffix}"


def pattern_of_ranks(name: str) -> str:
    """A :mod:`glob` pattern of the files that all ranks write for a name, including series of files."""
    stem, suffix = _split(name)
    if RANK not in name:
        return f"{glob.escape(stem.removesuffix(_TRACE))}.rank*{suffix}"
    return f"{glob.escape(stem).replace(RANK, '*').replace(PID, '*')}*{suffix}"


def of_last_attempt(paths: Sequence[str]) -> list[str]:
    """The paths of files that were written after the last restart."""
    attempts = [int(match.group(1)) if (match := re.search(rf"\.{_RESTART}(\d+)\.", path)) else 0 for path in paths]
    return [path for path, attempt in zip(paths, attempts, strict=True) if attempt == max(attempts)]


def file_names(options: argparse.Namespace, stem: str) -> list[str]:
    """The names of the files to write, as given or by default; without the rank."""
    return [name for name in _requested(options, stem) if format_of(name, TRACES)]


def exporters_of(options: argparse.Namespace, stem: str) -> list[SpanExporter]:
    """The exporters: one for the receiver (``--endpoint``, else the environment's), and one per file.

    Raises:
        TorchProfError, ValueError: a file cannot be written, a suffix names no format, or there is no file to explain.
    """
    if (options.explain or options.report) and not file_names(options, stem):
        option = "--explain" if options.explain else "--report"
        raise ValueError(f"{option} reads the file that is written, and there is none: add -o FILE")
    if options.report:
        check_writable(options.report)
    names = [_RECEIVER] if options.endpoint else []
    names += [name for name in _requested(options, stem) if name != "none"]
    places = {name if name == _RECEIVER else (os.path.realpath(name), format_of(name, TRACES)): name for name in names}
    return [_exporter(name, options) for name in places.values()]


def policy_of(options: argparse.Namespace, exporters: list[SpanExporter]) -> SpanPolicy:
    """The policy that selects the steps that are traced in full.

    Raises:
        ValueError: an option is invalid, or has no effect.
    """
    from otel_torchprof._export.otlp import OTLPExporter

    given = config.of_flags(vars(options), config.fields_in(config.POLICY).values())
    if options.schedule is not None:
        given["schedule"] = schedule_of(options.schedule)
    sends = any(isinstance(exporter, OTLPExporter) for exporter in exporters)
    policy = policy_without_code() if sends and not given else replace(SpanPolicy.from_environment(), **given)
    if options.keep and policy.keep != "all" and all(map(takes_whole_traces, exporters)):
        names = ", ".join(exporter.path for exporter in exporters if isinstance(exporter, FileSpanExporter))
        raise ValueError(
            f"keep is {options.keep!r}, and nothing heeds it: {names} gets every step; add -o FILE.otlp or --endpoint URL"
        )
    return policy


def check_outputs(options: argparse.Namespace, stem: str) -> None:
    """Raises errors in the options once, before ranks are started and each of them raises them.

    Raises:
        TorchProfError, ValueError: as :func:`exporters_of` and :func:`policy_of`.
    """
    exporters = exporters_of(options, stem)
    try:
        policy_of(options, exporters)
    finally:
        for exporter in exporters:
            exporter.shutdown()


def _requested(options: argparse.Namespace, stem: str) -> list[str]:
    names: list[str] = options.output or ([] if options.endpoint else [f"{stem}{_TRACE}.json.gz"])
    return names


def _exporter(name: str, options: argparse.Namespace) -> SpanExporter:
    from otel_torchprof._export.otlp import OTLPExporter

    if name == _RECEIVER:
        return OTLPExporter(options.endpoint)
    format_name = format_of(name, TRACES)
    exporter = None if format_name is None else TRACES[format_name].exporter
    if exporter is None:
        raise TorchProfError(
            f"--output is {name!r}; its name must end in {', '.join(TRACE_ENDINGS)}, or be otlp or none"
        )
    return exporter.load()(name_of_rank(name, os.environ), **config.of_flags(vars(options), exporter.options))


def _split(name: str) -> tuple[str, str]:
    """The name of a file without its suffix, and the suffix."""
    suffix = max((ending for ending in (*TRACE_ENDINGS, SUFFIX) if name.endswith(ending)), key=len)
    return name.removesuffix(suffix), suffix
