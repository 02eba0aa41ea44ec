"""Reads dumps of PyTorch's flight recorder, which know which NCCL collectives are complete; black boxes do not.

The format is that of ``torch._C._distributed_c10d._dump_fr_trace`` (a pickle, also in the files that NCCL's watchdog writes on a timeout)
and ``_dump_fr_trace_json``, version 2.x: ``entries`` of single operations, and ``pg_config`` with the ranks of each group.
"""

from __future__ import annotations

import io
import json
import math
import pickle  # for its format alone: _Plain refuses whatever would run code
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._native.blackbox import Collective, Group
from otel_torchprof.errors import TorchProfError

from .box_file import opened
from .rank_state import GroupKey, RankState, RunKey, by_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_NAME = re.compile(r"(?:rank|dump)_(\d{1,7})(?:\.(?:json|pickle|pkl))?$")
"""Matches the name of a dump's file, which ends with the rank after the prefix of ``TORCH_FR_DUMP_TEMP_FILE``."""
_LARGEST, _HEAD = 1 << 28, 4096
_DEFAULT_DESCRIPTION = "default_pg"
_MOST_TENSORS, _MOST_DIMENSIONS = 65_536, 64
_PEER = re.compile(r"(?:->|<-)(\d+)")
_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
_MILLISECOND = 10**6
_MOST = 1 << 62
"""Upper bound of valid numbers."""
_OF_ONE_HANG_NS = 600 * 10**9
"""Time within which all ranks write their dumps after a timeout."""


class Dump(NamedTuple):
    """A rank's dump."""

    rank: int
    written_ns: int
    """Unix ns."""
    calls: Sequence[Collective]
    sizes: Mapping[GroupKey, int]
    """Number of ranks of each group, if the dump has it."""


def rank_of_file(path: Path) -> int | None:
    """The rank in the name of a dump's file; None if it is not the name of a dump."""
    match = _NAME.search(path.name)
    return None if match is None else int(match[1])


def is_dump(path: Path) -> bool:
    """Whether a file has the name of a dump, and begins like one.

    Raises:
        OSError: it cannot be read.
    """
    if rank_of_file(path) is None or not path.is_file():
        return False
    with opened(path) as file:
        head = file.read(_HEAD)
    return head[:1] in {b"{", b"\x80"} and b"version" in head


def read_dump(path: Path, rank: int) -> Dump:
    """Reads a dump, without trust in its contents.

    Raises:
        TorchProfError: it cannot be read, is no dump, or has unknown entries: without them, the rank would seem late.
    """
    try:
        with opened(path) as file:
            data = file.read(_LARGEST)
        written = path.stat().st_mtime_ns
    except OSError as error:
        raise TorchProfError(f"cannot read {str(path)!r}: {error.strerror}") from error
    contents = _loaded(data)
    if not isinstance(contents, dict) or not isinstance(contents.get("entries", []), list) or "version" not in contents:
        raise TorchProfError(f"cannot read {str(path)!r}: no dump of PyTorch's flight recorder")
    sizes = _groups(contents.get("pg_config"))
    keys = {key.name: key for key in sizes}
    entries = contents.get("entries", [])
    calls = [call for entry in entries if (call := _collective(entry, keys)) is not None]
    if len(calls) < len(entries):
        unknown = f"{len(entries) - len(calls):,} of its {len(entries):,} entries"
        raise TorchProfError(f"cannot read {str(path)!r}: {unknown} are of a form that is not known")
    return Dump(rank, written, calls, sizes)


def with_dumps(states: Sequence[RankState], dumps: Iterable[Dump]) -> tuple[list[RankState], list[int]]:
    """Adds what the dumps know to the states of boxes; returns the states, and the ranks whose dumps are left out.

    Ranks without a box get a state from their dump. Left out are dumps of an earlier run, and dumps that are older than later
    collectives in the box.
    """
    latest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written_ns)}
    opened = [state.opened_ns for state in states if state.opened_ns]
    began = min(opened) if opened else max((dump.written_ns for dump in latest.values()), default=0) - _OF_ONE_HANG_NS
    known = {state.rank: state for state in states}
    used = {
        rank: dump
        for rank, dump in sorted(latest.items())
        if dump.written_ns >= began and not (rank in known and _is_behind(dump, known[rank]))
    }
    world = max((state.run.world_size for state in states), default=0)
    merged = [_merged(state, used[state.rank]) if state.rank in used else state for state in states]
    alone = [_alone(dump, world) for rank, dump in used.items() if rank not in known]
    return [*merged, *alone], sorted(latest.keys() - used.keys())


def _is_behind(dump: Dump, state: RankState) -> bool:
    """Whether the box has later collectives of a group than the dump."""
    last: dict[str, int] = defaultdict(int)
    for call in dump.calls:
        if not call.is_transfer:
            last[call.group] = max(last[call.group], call.sequence_nr)
    return any(key.name in last and state.last_number(key) > last[key.name] for key in state.groups)


class _Plain(pickle.Unpickler):
    """Unpickles only texts, numbers, lists and dictionaries."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - damaged pickles raise errors of many kinds
        return None


def _groups(config: Any) -> dict[GroupKey, int]:
    """The groups, and the number of ranks of each."""
    sizes = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        if isinstance(name, str) and isinstance(group, dict):
            text = group.get("ranks")
            ranks = re.findall(r"\d+", text) if isinstance(text, str) else []
            is_default = group.get("desc") == _DEFAULT_DESCRIPTION
            sizes[GroupKey(name, "" if is_default else ",".join(ranks))] = len(ranks)
    return sizes


def _collective(entry: Any, keys: Mapping[str, GroupKey]) -> Collective | None:
    try:
        return _read(entry, keys)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None  # of a later version, or damaged


def _read(entry: Mapping[str, Any], keys: Mapping[str, GroupKey]) -> Collective:
    backend, _, name = _text(entry["profiling_name"]).rpartition(":")
    group = _text(entry["process_group"][0])
    key = keys.get(group, GroupKey(group, ""))
    peer = _PEER.search(name)
    status = _text(entry["state"])
    is_complete = status == "completed" or (backend == "gloo" and bool(entry.get("retired")))
    created, started = _number(entry["time_created_ns"]), _number(entry.get("time_discovered_started_ns") or 0)
    completed = _number(entry.get("time_discovered_completed_ns") or 0)
    is_transfer = bool(entry.get("is_p2p"))
    dtypes = [_text(dtype) for dtype in entry["input_dtypes"]]
    shapes = _shapes(entry["input_sizes"])
    return Collective(
        name=name.split()[0],
        group=key.name,
        ranks=key.ranks,
        dtype=dtypes[0].lower() if dtypes else "",
        reduce_op="",
        sequence_nr=_number(entry["p2p_seq_id" if is_transfer else "collective_seq_id"]),
        bytes_in=_bytes(shapes, dtypes),
        bytes_out=_bytes(_shapes(entry["output_sizes"]), [_text(dtype) for dtype in entry["output_dtypes"]]),
        root=-1,
        peer=int(peer[1]) if peer else -1,
        tag=-1,
        is_transfer=is_transfer,
        is_async=False,
        has_failed=False,
        is_tracked=True,
        os_tid=0,
        enqueued_ns=created,
        completed_ns=(completed or created or 1) if is_complete else 0,
        started_ns=started or ((created or 1) if status == "started" else 0),
        timeout_ns=_number(entry.get("timeout_ms") or 0) * _MILLISECOND,
        shapes=str(shapes),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError("no number")
    return value


def _shapes(sizes: Any) -> list[list[int]]:
    """Checks the shapes of tensors; limits their number, since a small pickle may expand to many by sharing objects."""
    if not isinstance(sizes, list) or len(sizes) > _MOST_TENSORS:
        raise ValueError("no sizes of tensors")
    shapes = [[_number(size) for size in shape[:_MOST_DIMENSIONS]] for shape in sizes if isinstance(shape, list)]
    if len(shapes) < len(sizes):
        raise ValueError("no sizes of tensors")
    return shapes


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Total bytes of tensors; 0 if a type is unknown, or if the sum is too large."""
    sizes = [math.prod(shape) * _BYTES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False)]
    return sum(sizes) if all(sizes) and sum(sizes) < _MOST else 0


def _by_group(calls: Iterable[Collective]) -> Mapping[GroupKey, list[Collective]]:
    calls_by_group: dict[GroupKey, list[Collective]] = defaultdict(list)
    for call in calls:
        calls_by_group[GroupKey(call.group, call.ranks)].append(call)
    return calls_by_group


def _merged(state: RankState, dump: Dump) -> RankState:
    """The state of a rank's box, with the dump's states for groups of which the box only knows what was enqueued."""
    groups, calls, transfers = dict(state.groups), dict(state.calls), list(state.transfers)
    for dumped, entries in _by_group(dump.calls).items():
        key = next((key for key in groups if key == dumped or (key.name == dumped.name and not key.ranks)), None)
        if key is None or groups[key].is_tracked:
            continue
        known = {call.sequence_nr: call for call in entries if not call.is_transfer}
        calls[key] = {
            number: _completed(call, known[number]) if number in known else call
            for number, call in calls.get(key, {}).items()
        }
        last = max((number for number, call in known.items() if call.completed_ns), default=-1)
        groups[key] = groups[key]._replace(is_tracked=bool(known), last_completed=last)
        transfers += (
            call._replace(group=key.name, ranks=key.ranks) for call in entries if call.is_transfer and call.is_pending
        )
    return state._replace(groups=groups, calls=calls, transfers=transfers)


def _completed(call: Collective, dumped: Collective) -> Collective:
    return call._replace(
        is_tracked=True,
        completed_ns=dumped.completed_ns,
        started_ns=dumped.started_ns,
        timeout_ns=dumped.timeout_ns,
        shapes=dumped.shapes,
    )


def _alone(dump: Dump, world: int) -> RankState:
    """The state of a rank without a box."""
    calls, repeated = by_number(dump.calls)
    transfers = [call for call in dump.calls if call.is_transfer and call.is_pending]
    return RankState(
        rank=dump.rank,
        pid=0,
        host="",
        run=RunKey("", 0, world),
        is_alive=False,
        is_closed=False,
        opened_ns=0,
        last_ns=dump.written_ns,
        place="",
        last_ended="",
        since_ns=0,
        groups={key: _group(key, known, dump) for key, known in calls.items()},
        transfer_groups={
            key: _group(key, {}, dump) for key in {GroupKey(call.group, call.ranks) for call in transfers}
        },
        calls=calls,
        repeated=repeated,
        transfers=transfers,
        has_box=False,
    )


def _group(key: GroupKey, calls: Mapping[int, Collective], dump: Dump) -> Group:
    listed, complete = key.listed, [number for number, call in calls.items() if call.completed_ns]
    return Group(
        name=key.name,
        ranks=key.ranks,
        backend="",
        size=dump.sizes.get(key, 0),
        rank=listed.index(dump.rank) if dump.rank in listed else dump.rank,
        is_transfers=not calls,
        is_tracked=True,
        enqueued=len(calls),
        completed=len(complete),
        last_enqueued=max(calls, default=-1),
        last_completed=max(complete, default=-1),
    )
