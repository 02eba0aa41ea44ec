"""Which names of torch's profilers are here, as a page of the docs, and which are not, each with what to use instead."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generated
import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch-names.md"
PINNED = "2.13.0"
"""The release that the page is of."""
MODULES = {
    "torch.profiler": "otel_torchprof",
    "torch.autograd.profiler": "otel_torchprof.profiler",
    "torch.autograd.profiler_util": "otel_torchprof.profiler_util",
    "torch.autograd.profiler_legacy": "otel_torchprof.legacy",
    "torch._dynamo.profiler": "otel_torchprof.dynamo",
}
"""torch's, and ours that has its names."""
INSTEAD = {
    "torch.profiler.profile._get_distributed_info": "`distributedInfo` of the Chrome file",
    "torch.profiler.profile._trace_ready": "`on_trace_ready=`",
    "torch.profiler.profile._transit_action": "`start()`, `stop()`, `step()`",
    "torch.autograd.profiler.profile._ensure_function_events": "`function_events`, which is made when it is read",
    "torch.autograd.profiler.profile._parse_kineto_results": "`kineto_results.events()`",
    "torch.profiler._optimizer_post_hook": "nothing: `KinetoStepTracker` counts without it",
    "torch.profiler._Ts": "nothing: a type of its annotations",
    "torch.autograd.profiler._ProfilerStats": "`_stats()` of a profile, which has its fields",
    "torch.autograd.profiler._maybe_cupti_monitor": "nothing: CUPTI is not used",
    "torch.autograd.profiler._run_on_profiler_start": "nothing: torch's flag is set while a profile records",
    "torch.autograd.profiler._run_on_profiler_stop": "nothing: torch's flag is cleared with the last profile",
    "torch.autograd.profiler._set_active_cupti_profiler_observer": "nothing: CUPTI is not used",
    "torch.autograd.profiler._set_is_profiler_enabled": "nothing: torch's flag is set while a profile records",
    "torch.autograd.profiler.KinetoStepTracker._current_step": "`current_step()`",
    "torch.autograd.profiler.KinetoStepTracker._step_dict": "`init_step_count()`, `increment_step()`, `erase_step_count()`",
    "torch.autograd.profiler_util.EventList._populate_cpu_children": "nothing: lists come with it done",
    "torch.autograd.profiler_util.EventList._remove_dup_nodes": "nothing: lists come with it done",
    "torch.autograd.profiler_util.EventList._set_backward_stacktraces": "nothing: lists come with it done",
    "torch.autograd.profiler_util._to_bool": "nothing: reads torch's own metadata",
    "torch.autograd.profiler_util._to_str": "nothing: reads torch's own metadata",
    "torch.autograd.profiler_legacy._parse_legacy_records": "`function_events`",
    "torch.autograd.profiler_legacy.profile._check_finish": "nothing: what is read too early raises by itself",
    "torch.autograd.profiler_legacy.profile._start_trace": "`with` or `__enter__()`",
}
"""Names of torch that are not here."""


def own_names(module: ModuleType) -> list[str]:
    """What a module defines or says to be public."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("__") and getattr(value, "__module__", "") == module.__name__
    ]
    return sorted({*defined, *getattr(module, "__all__", ())})


def members(kind: type) -> list[str]:
    """What torch's classes among its bases define; not what Python's named tuples generate."""
    own = {name for base in kind.__mro__ if base.__module__.startswith("torch") for name in vars(base)}
    generated = {"_abc_impl", "_asdict", "_field_defaults", "_fields", "_make", "_replace"}
    return sorted(name for name in own - generated if not name.startswith("__"))


def surface() -> dict[str, tuple[str, list[str], list[str]]]:
    """Of each module and class of torch's: ours, its names that are here, and those that are not."""
    found: dict[str, tuple[str, list[str], list[str]]] = {}

    def note(theirs: str, ours: str, here: Any, names: list[str]) -> None:
        missing = [name for name in names if not hasattr(here, name)]
        found[theirs] = ours, [name for name in names if name not in missing], missing

    for theirs, ours in MODULES.items():
        module, here = importlib.import_module(theirs), importlib.import_module(ours)
        names = own_names(module)
        note(theirs, ours, here, names)
        for name in names:
            kind = getattr(module, name)
            is_own = inspect.isclass(kind) and kind.__module__ in {theirs, f"{theirs}.profiler"}
            if is_own and hasattr(here, name) and members(kind):
                note(f"{theirs}.{name}", f"{ours}.{name}", getattr(here, name), members(kind))
    return found


def page() -> str:
    """docs/torch-names.md."""
    rows = [
        f"| `{theirs}` | `{ours}` | {', '.join(f'`{name}`' for name in names)} | "
        + "; ".join(f"`{name}`: {INSTEAD[f'{theirs}.{name}']}" for name in missing)
        + " |"
        for theirs, (ours, names, missing) in surface().items()
    ]
    return "\n".join(
        [
            "# Names of torch's profilers",
            "",
            f"Every module and class of the profilers of torch {PINNED}, private names included: which names this package has, and",
            "what to use instead of the others. [Profile code](profile.md#replace-torchprofiler) says where arguments and results differ.",
            "Generated by `tests/torch/test_torch_surface.py` from the installed torch; `make generated` writes it.",
            "",
            "| torch | otel_torchprof | available names | missing names, and what to use |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def test_every_name_is_here_or_says_what_to_use():
    """What torch's profilers have and we have not is named, with the way out; nothing is named that is here."""
    here = {f"{theirs}.{name}" for theirs, (_, names, _) in surface().items() for name in names}
    missing = {f"{theirs}.{name}" for theirs, (_, _, names) in surface().items() for name in names}
    assert missing <= INSTEAD.keys()
    assert not here & INSTEAD.keys()


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the page is of torch {PINNED}")
def test_the_page_is_up_to_date():
    """docs/torch-names.md has them all."""
    generated.check(PAGE, page())
