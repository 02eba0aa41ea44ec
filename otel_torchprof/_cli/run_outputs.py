"""Where ``otel-torchprof run`` writes and sends to: by the names that were given, and by rank where there are several."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_torchprof import config
from otel_torchprof._export.file_exporter import PID, RANK, FileSpanExporter
from otel_torchprof._export.formats import ENDINGS, FORMATS, format_of
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
    """Which rank this process is, as its launcher says; None where it is the only one."""
    place = place_in(environ)
    return None if place is None or place.world_size == 1 else place


def name_of_rank(name: str, environ: Mapping[str, str]) -> str:
    """The name of a file for this process alone: ``train.trace.json.gz`` becomes ``train.rank3.trace.json.gz``.

    After the rank stand torchrun's role, unless it is torchrun's default, and how often the ranks were begun anew, unless they were
    not: ``train.rank3.actor.restart1.trace.json.gz``. The same name where there is one process, or where it has ``{rank}``.
    """
    place = place_among_ranks(environ)
    if place is None or RANK in name:
        return name
    parts = [f"rank{place.rank}"]
    if role := role_in(environ):
        parts.append(re.sub(r"[^\w-]", "_", role))
    if restart := restart_in(environ):
        parts.append(f"{_RESTART}{restart}")
    stem, suffix = _split(name)
    plain = stem.removesuffix(_TRACE)
    return f"{plain}.{'.'.join(parts)}{stem[len(plain) :]}{suffix}"


def pattern_of_ranks(name: str) -> str:
    """A pattern for :mod:`glob` that finds the files of all ranks of a name, also where each has written several."""
    stem, suffix = _split(name)
    if RANK not in name:
        return f"{glob.escape(stem.removesuffix(_TRACE))}.rank*{suffix}"
    return f"{glob.escape(stem).replace(RANK, '*').replace(PID, '*')}*{suffix}"


def of_last_attempt(paths: Sequence[str]) -> list[str]:
    """Those of the files of ranks that were written after the last restart."""
    attempts = [int(found.group(1)) if (found := re.search(rf"\.{_RESTART}(\d+)\.", path)) else 0 for path in paths]
    return [path for path, attempt in zip(paths, attempts, strict=True) if attempt == max(attempts)]


def file_names(options: argparse.Namespace, stem: str) -> list[str]:
    """The names of the files that are to be written, as they were given or are by default."""
    return [name for name in _requested(options, stem) if format_of(name)]


def exporters_of(options: argparse.Namespace, stem: str) -> list[SpanExporter]:
    """What takes the spans: the receiver, and the files, each once. The receiver is ``--endpoint``, or the environment's.

    Raises:
        TorchProfError, ValueError: one cannot be written, or has a name that says nothing; there is no file to explain.
    """
    if options.explain and not file_names(options, stem):
        raise ValueError("--explain reads the file that is written, and there is none: add -o FILE")
    names = [_RECEIVER] if options.endpoint else []
    names += [name for name in _requested(options, stem) if name != "none"]
    places = {name if name == _RECEIVER else (os.path.realpath(name), format_of(name)): name for name in names}
    return [_exporter(name, options) for name in places.values()]


def policy_of(options: argparse.Namespace, exporters: list[SpanExporter]) -> SpanPolicy:
    """Which steps are traced in full.

    Raises:
        ValueError: an option is bad, or of no use.
    """
    from otel_torchprof._export.otlp import OTLPExporter

    given = config.of_flags(vars(options), config.fields_in(config.POLICY).values())
    if options.schedule is not None:
        given["schedule"] = schedule_of(options.schedule)
    sends = any(isinstance(exporter, OTLPExporter) for exporter in exporters)
    policy = policy_without_code() if sends and not given else replace(SpanPolicy.from_environment(), **given)
    if options.keep and policy.keep != "all" and all(map(takes_whole_traces, exporters)):
        names = ", ".join(each.path for each in exporters if isinstance(each, FileSpanExporter))
        raise ValueError(
            f"keep is {options.keep!r}, and nothing heeds it: {names} gets every step; add -o FILE.otlp or --endpoint URL"
        )
    return policy


def check_outputs(options: argparse.Namespace, stem: str) -> None:
    """Finds out once, before there are ranks, what each of them would.

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
    found: list[str] = options.output or ([] if options.endpoint else [f"{stem}{_TRACE}.json.gz"])
    return found


def _exporter(name: str, options: argparse.Namespace) -> SpanExporter:
    from otel_torchprof._export.otlp import OTLPExporter

    if name == _RECEIVER:
        return OTLPExporter(options.endpoint)
    format_name = format_of(name)
    if format_name is None:
        raise TorchProfError(f"--output is {name!r}; its name must end in {', '.join(ENDINGS)}, or be otlp or none")
    exporter = FORMATS[format_name].exporter
    return exporter.load()(name_of_rank(name, os.environ), **config.of_flags(vars(options), exporter.options))


def _split(name: str) -> tuple[str, str]:
    """The name of a file without its suffix, and that."""
    suffix = max((each for each in (*ENDINGS, SUFFIX) if name.endswith(each)), key=len)
    return name.removesuffix(suffix), suffix
