"""What ``torch.distributed.distributed_c10d`` is to this package, without torch."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


class Store:
    """A store that the ranks of a test share; prefixes around it are left out."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


class NoStore:
    """One that cannot do what is asked of it."""

    def compare_set(self, *_: Any) -> bytes:
        raise RuntimeError("Not implemented.")


class Group:
    """A process group, as far as it is looked at."""

    def __init__(self, description: str) -> None:
        self.group_desc = description


class C10d(ModuleType):
    """One process's view; :meth:`init` is ``init_process_group``."""

    def __init__(self) -> None:
        super().__init__("torch.distributed.distributed_c10d")
        self.group: tuple[int, int] | None = None
        self.store: Any = None
        self._world = SimpleNamespace(pg_names={}, pg_group_ranks={})

    def init(self, rank: int, size: int, store: Any) -> None:
        self.store = store
        self._update_default_pg((rank, size))
        self.add_group("0", "default_pg", range(size))

    def add_group(self, name: str, description: str, ranks: Any) -> None:
        group = Group(description)
        self._world.pg_names[group] = name
        self._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}

    def _update_default_pg(self, group: tuple[int, int] | None) -> None:
        self.group = group

    def is_initialized(self) -> bool:
        return self.group is not None

    def get_rank(self) -> int:
        return self.group[0] if self.group else -1

    def get_world_size(self) -> int:
        return self.group[1] if self.group else -1

    def _get_default_store(self) -> Any:
        return self.store
