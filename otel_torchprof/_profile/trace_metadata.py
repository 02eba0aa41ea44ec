"""Metadata at the top level of a profile's Chrome trace."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable


class TraceMetadata:
    """Values by key, added by the user at any time or when a recording starts. Later values replace earlier ones."""

    def __init__(self) -> None:
        self.preset: dict[str, Any] = {}
        """Values to add when a recording starts."""
        self.entries: dict[str, Any] = {}

    def add(self, key: str, value: str) -> None:
        """Adds a text.

        Raises:
            TypeError: the value is no text.
        """
        if not isinstance(value, str):
            raise TypeError(f"add_metadata: the value of {key!r} is {value!r}; it must be a str")
        self.entries[key] = value

    def add_json(self, key: str, value: str) -> None:
        """Adds a value, given as JSON.

        Raises:
            ValueError: the text is not JSON.
        """
        self.entries[key] = _parsed(key, value)

    def add_preset(self, key: str, value: str) -> None:
        """Adds a value, given as JSON, at the next start of a recording."""
        self.preset[key] = _parsed(key, value)

    def note(self, trace_id: str, options: Iterable[str]) -> None:
        """Adds the id and the options of a recording that starts, and the preset values."""
        self.entries["trace_id"] = trace_id
        self.entries.update(dict.fromkeys(options, 1))
        distributed = distributed_info()
        if distributed is not None:
            self.entries["distributedInfo"] = distributed
        self.entries.update(self.preset)


def _parsed(key: str, value: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(value, parse_constant=refuse)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata {key!r} is {value!r}; it must be a JSON text: {error}") from error


def distributed_info() -> dict[str, Any] | None:
    """Torch's ``distributedInfo`` on the process groups, for tools that read several ranks; None without process groups."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    backend = dist.get_backend()
    info = {
        "backend": backend,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "pg_count": dist.get_pg_count(),
        "pg_config": dist.distributed_c10d._get_all_pg_configs(),  # noqa: SLF001 - there is no public place
    }
    if backend == "nccl":
        info["nccl_version"] = ".".join(str(part) for part in sys.modules["torch"].cuda.nccl.version())
    plain: dict[str, Any] = json.loads(json.dumps(info, default=lambda value: value.tolist()))
    return plain
