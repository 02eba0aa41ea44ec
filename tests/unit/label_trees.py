"""Recorded labels as text."""

from __future__ import annotations

from otel_torchprof._columns.schema import Flag


def tree(prof):
    """Each event as ``outer/inner``, followed by the class of the exception that left it and whether it is unfinished."""
    names, columns = prof.names, prof.columns
    paths = []
    for name, parent, error, flags in zip(
        *(columns[column].tolist() for column in ("name", "parent", "error_type", "flags")), strict=True
    ):
        path = f"{paths[parent].split(' ')[0]}/{names[name]}" if parent >= 0 else names[name]
        path += f" !{names[error]}" if flags & Flag.ERROR else ""
        paths.append(path + (" ..." if flags & Flag.UNFINISHED else ""))
    return paths
