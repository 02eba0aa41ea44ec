"""Four ranks under torchrun, with gloo: what their spans say of each other. All tests look at one run of rank_program.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from jsonl_exporter import read
from launched import launched
from rank_program import SAMPLED_STEPS, STEPS

from otel_torchprof._ranks.rank_ids import Run, step_span_id, step_trace_id

if TYPE_CHECKING:
    from pathlib import Path

RANKS = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the ranks have written."""
    found: Path = tmp_path_factory.mktemp("ranks")
    done = launched("rank_program", found)
    assert done.returncode == 0, done.stderr
    return found


def spans_of(folder: Path, phase: str) -> dict[int, list[dict[str, Any]]]:
    """The spans of each rank."""
    processes = read(folder / phase).values()
    return {spans[0]["resource"]["torch.distributed.rank"]: spans for spans in processes if spans}


def steps_of(spans: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {span["attributes"]["torch.step.number"]: span for span in spans if span["name"] == "torch.step"}


def info_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


def run_of(span: dict[str, Any]) -> Run:
    resource = span["resource"]
    return Run(resource["torch.run.id"], resource["torch.run.restart"], resource["torch.run.attempt"])


def test_each_rank_has_a_trace_per_step_with_ids_that_all_can_derive(folder):
    """Trace and span ids of every rank's steps are those that follow from the run, the rank and the step."""
    ranks = spans_of(folder, "apart")
    assert sorted(ranks) == list(RANKS)
    runs = {run_of(span) for spans in ranks.values() for span in spans}
    assert len(runs) == 1  # none was given: one was made, and all have it
    (run,) = runs
    for rank, spans in ranks.items():
        steps = steps_of(spans)
        assert steps.keys() >= set(range(STEPS))
        for number, step in steps.items():
            expected = step_trace_id(run, number, rank), step_span_id(run, number, rank), 0
            assert (step["trace"], step["span"], step["parent"]) == expected
        operators = [span for span in spans if span["name"] == "aten::addmm"]
        assert {span["trace"] for span in operators} >= {steps[number]["trace"] for number in range(STEPS)}


def test_steps_link_to_the_step_before_and_to_the_first_rank(folder):
    """Each step of a rank links to its last one; on ranks but the first also to the first rank's same step, which is there."""
    ranks = {rank: steps_of(spans) for rank, spans in spans_of(folder, "apart").items()}
    for rank in RANKS:
        for number in range(1, STEPS):
            expected = [ranks[rank][number - 1]] + ([ranks[0][number]] if rank else [])
            links = ranks[rank][number]["links"]
            assert all([span["trace"], span["span"]] in links for span in expected)


def test_any_rank_can_name_the_span_of_another(folder):
    """step_context(2, 1), asked on every rank, is the span that rank 2 has sent of its step 1, in both layouts."""
    for phase in ("apart", "together"):
        step = steps_of(spans_of(folder, phase)[2])[1]
        assert {tuple(info[phase]["context"]) for info in info_of(folder)} == {(step["trace"], step["span"])}


def test_together_a_step_of_all_ranks_is_one_trace(folder):
    """Its root is the first rank's step; the others' steps are that one's children; what ran in them is in the trace too."""
    ranks = spans_of(folder, "together")
    for number in range(STEPS):
        steps = {rank: steps_of(spans)[number] for rank, spans in ranks.items()}
        (trace,) = {step["trace"] for step in steps.values()}
        assert [steps[rank]["parent"] for rank in RANKS] == [0, *[steps[0]["span"]] * 3]
        members = [span for spans in ranks.values() for span in spans if span["trace"] == trace]
        ids = {span["span"] for span in members}
        assert len(ids) == len(members) > len(RANKS)
        assert all(span["parent"] in ids for span in members if span["parent"])


def test_ranks_that_do_not_export_record_nothing(folder):
    """With export_ranks="one" only rank 0 has sent anything; the others say why, and have put nothing into torch."""
    assert list(spans_of(folder, "one")) == [0]
    first, *others = [info["one"] for info in info_of(folder)]
    assert first["sources"]["recording"] == "on"
    for rank, info in enumerate(others, 1):
        assert info["sources"] == {"recording": f"off: rank {rank} of 4 does not export: export_ranks is 'one'"}
        assert info["hooks"] == "torch.distributed.distributed_c10d"


def test_resources_tell_ranks_apart(folder):
    """Rank, local rank, world size, instance and the groups of the device mesh that the rank is in; metrics get the same."""
    for rank, spans in spans_of(folder, "apart").items():
        resource = spans[-1]["resource"]
        run = resource["torch.run.id"]
        expected = {
            "torch.distributed.rank": rank,
            "torch.distributed.local_rank": rank,
            "torch.distributed.world_size": 4,
            "torch.distributed.local_world_size": 4,
            "torch.distributed.node_rank": 0,
            "torch.run.id": run,
            "torch.run.restart": 0,
            "torch.run.attempt": resource["torch.run.attempt"],
            "service.instance.id": f"{run}/{rank}",
        }
        groups = [f"mesh_dp:{rank % 2},{rank % 2 + 2}", f"mesh_tp:{rank // 2 * 2}-{rank // 2 * 2 + 1}"]
        assert resource == {"service.name": "ranks", **expected, "torch.distributed.groups": groups}
        assert info_of(folder)[rank]["apart"]["resource"] == expected


def test_a_process_group_that_comes_later_counts_from_the_first_step(folder):
    """Instrumented before init_process_group: the first step has its derived ids; and no other recording has them again."""
    found = {rank: steps_of(spans)[0] for rank, spans in spans_of(folder, "before").items()}
    for rank, step in found.items():
        assert step["trace"] == step_trace_id(run_of(step), 0, rank)
    later = {rank: steps_of(spans)[0] for rank, spans in spans_of(folder, "apart").items()}
    assert all(found[rank]["trace"] != later[rank]["trace"] for rank in RANKS)
    assert {run_of(step).run_id for step in (*found.values(), *later.values())} == {run_of(found[0]).run_id}


def test_a_sampler_by_trace_id_decides_alike_on_all_ranks(folder):
    """With a ratio of one half, together, every rank has sent the same steps: some, and not all. The program's own attribute stays."""
    chosen = [sorted(steps_of(spans)) for spans in spans_of(folder, "sampled").values()]
    assert len(chosen) == len(RANKS)
    complete = [[number for number in numbers if number < SAMPLED_STEPS] for numbers in chosen]
    assert all(numbers == complete[0] for numbers in complete)
    assert 0 < len(complete[0]) < SAMPLED_STEPS
    resources = [span["resource"] for spans in spans_of(folder, "sampled").values() for span in spans]
    assert {resource["torch.run.id"] for resource in resources} == {"mine"}


def test_nothing_is_left_in_torch(folder):
    """After uninstrument() the function that sets the process group is torch's own again."""
    for info in info_of(folder):
        assert info["apart"]["hooks"] == "otel_torchprof._ranks.ranks"
        assert info["after"] == "torch.distributed.distributed_c10d"
        assert info["apart"]["sources"]["ranks"] == "on"
