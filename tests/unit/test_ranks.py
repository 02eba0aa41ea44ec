"""What a process knows of its ranks, from its launcher and from a process group."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from fake_c10d import C10d, NoStore, Store
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from providers import instrumented, new_provider

import otel_torchprof as otp
from otel_torchprof._export.provider import Provider
from otel_torchprof._instrument.step_contexts import RankResourceDetector
from otel_torchprof._ranks import ranks as ranks_module
from otel_torchprof._ranks.ranks import Ranks, ranges

MODULE = "torch.distributed.distributed_c10d"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@contextmanager
def torch_of(process: C10d):
    """Within, the calling test is this process."""
    with patch.dict(sys.modules, {MODULE: process}):
        yield


def joined(rank: int, size: int, store: object, *args, **options) -> Ranks:
    """A rank whose process group is there already."""
    process = C10d()
    process.init(rank, size, store)
    ranks = Ranks(*args, **{"environ": {}} | options)
    with torch_of(process):
        ranks.look()
    return ranks


def test_a_process_alone_is_no_rank():
    """Without launcher and process group there are no attributes, no ids, no state, and the provider's resource as it is."""
    ranks, own = Ranks(environ={}), Resource({"service.name": "s"})
    ranks.look()
    assert (ranks.attributes(), ranks.step_ids(1), ranks.state(), ranks.not_exporting_reason) == ({}, None, {}, None)
    assert ranks.resource(own) is own
    assert joined(0, 1, Store()).step_ids(1) is None


def test_what_a_launcher_says_is_known_before_there_is_a_process_group():
    """Rank and the like are attributes from the start; ids are not derived, and health says what is missing."""
    ranks = Ranks(environ=TORCHRUN)
    assert ranks.attributes() == {
        "torch.distributed.rank": 1,
        "torch.distributed.world_size": 2,
        "torch.distributed.local_rank": 1,
        "torch.distributed.local_world_size": 2,
    }
    assert ranks.step_ids(0) is None
    assert ranks.state() == {"ranks": "off: no process group of torch.distributed was made yet"}


def test_ranks_under_the_names_of_nemo_lens(monkeypatch):
    """With OTEL_TORCHPROF_RANKS=aliases=nemo_lens rank, size and local rank are also there under its names."""
    without = Ranks(environ=TORCHRUN).attributes()
    monkeypatch.setenv("OTEL_TORCHPROF_RANKS", "aliases=nemo_lens")
    assert Ranks(environ=TORCHRUN).attributes() == without | {
        "nv.dl.rank": 1,
        "nv.dl.world_size": 2,
        "nv.dl.local_rank": 1,
    }
    assert Ranks(environ={}).attributes() == {}


def test_ranks_agree_on_a_run_by_their_store():
    """Nobody gave an id: the first makes one, and all derive the same ids, of each other's steps and collectives too."""
    store = Store()
    first, second = joined(0, 2, store), joined(1, 2, store)
    assert first.run == second.run
    assert len(first.run.run_id) == 32
    assert first.step_ids(4).span_id == second.step_context(0, 4).span_id
    assert first.step_context(1, 4) == second.step_context(1, 4)
    assert first.collective_span("0", 3, 1, 4) == second.collective_span("0", 3, 1, 4)
    assert first.step_context(2, 4) is None
    assert first.state() == {"ranks": "on"}


def test_the_same_run_id_a_second_time_is_another_run():
    """Programs that always give the same id have the same attribute each time, and never the same ids."""
    environ = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "1"}
    today, tomorrow = joined(0, 2, Store(), environ=environ), joined(0, 2, Store(), environ=environ)
    assert today.attributes()["torch.run.id"] == tomorrow.attributes()["torch.run.id"] == "mine"
    assert today.attributes()["torch.run.restart"] == 1
    assert today.attributes()["torch.run.attempt"] != tomorrow.attributes()["torch.run.attempt"]
    assert today.step_ids(0).trace_id != tomorrow.step_ids(0).trace_id


@pytest.mark.parametrize("counted", [True, False])
def test_processes_that_are_begun_anew_with_the_same_store(monkeypatch, counted):
    """What torchrun begins anew is the same run, and has other ids; whether it counts that, and whoever had got how far before."""

    def joins(process: str, rank: int, restart: str) -> Ranks:
        monkeypatch.setattr(ranks_module, "_own_words", {os.getpid(): process})
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restart if counted else "0"}
        return joined(rank, 2, store, environ=environ)

    store = Store()
    before = [joins("a", 0, "0")] if counted else [joins("a", 0, "0"), joins("b", 1, "0")]
    after = [joins("c", 0, "1"), joins("d", 1, "1")]
    again = joins("d", 1, "1")
    assert {ranks.run for ranks in after} == {again.run}
    assert {ranks.run.run_id for ranks in after} == {before[0].run.run_id}
    assert after[0].run.restart == int(counted)
    assert after[0].step_ids(0).trace_id != before[0].step_ids(0).trace_id


def test_what_launchers_count_differently_is_agreed_on():
    """Agents of torchrun count restarts each for itself: what the first rank says is what all use."""
    store = Store()
    first = joined(0, 2, store, environ={"TORCHELASTIC_RESTART_COUNT": "2"})
    assert joined(1, 2, store, environ={}).run == first.run
    assert first.run.restart == 2


def test_a_store_is_asked_once():
    """Drains come for as long as the program runs; what they ask of a store that has failed is nothing."""
    asked: list[str] = []

    class Counting(NoStore):
        def compare_set(self, *args: str) -> bytes:
            asked.append(args[0])
            return super().compare_set(*args)

    process, ranks = C10d(), Ranks(environ={"TORCHELASTIC_RUN_ID": "mine"})
    process.init(0, 2, Counting())
    with torch_of(process):
        ranks.look()
        ranks.look()
    assert asked == ["otel_torchprof/run/1/0/0"]


def test_a_second_recording_of_a_process_has_other_ids():
    """Steps are counted from 0 again; their ids must not come again."""
    store = Store()
    first, second = (joined(0, 2, store, session=session) for session in (1, 2))
    assert first.run.run_id == second.run.run_id
    assert first.step_ids(0) != second.step_ids(0)


@pytest.mark.parametrize(
    ("environ", "linked"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "again"}, False),
        ({"OTEL_TORCHPROF_RANKS": "run_id=unique"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True),
    ],
)
def test_without_a_usable_store(environ, linked):
    """With MPI, say, ids are derived only where the environment names the run and no other has that name."""
    ranks = joined(1, 2, NoStore(), environ=environ)
    assert (ranks.step_ids(0) is not None) is linked
    expected = "on" if linked else "off: the process group has no store by which its ranks could agree on a run id"
    assert ranks.state() == {"ranks": expected}


def test_torch_is_right_and_the_launcher_wrong():
    """A program that hands out ranks by itself is believed; the launcher's local rank then means nothing."""
    ranks = joined(3, 4, Store(), environ=TORCHRUN)
    assert ranks.attributes()["torch.distributed.rank"] == 3
    assert "torch.distributed.local_rank" not in ranks.attributes()


def test_a_process_group_is_seen_when_it_is_made_and_torch_is_as_before_in_the_end():
    """Between start and stop a new process group is taken up at once; afterwards nothing of it is left in torch."""
    process, ranks, store = C10d(), Ranks(environ={}), Store()
    with torch_of(process):
        ranks.start()
        process.init(0, 2, store)
        run = ranks.run
        assert run is not None
        process._update_default_pg(None)
        assert ranks.run == run  # what was recorded until now is drained later
        process.init(0, 2, Store())
        assert ranks.run.attempt != run.attempt
        ranks.stop()
    assert "_update_default_pg" not in vars(process) or process._update_default_pg.__func__ is C10d._update_default_pg


def test_torch_that_cannot_be_asked_is_told_of_and_harms_nobody(caplog):
    """Whatever torch raises, init_process_group goes on, and health says why ranks are not linked."""
    process, ranks = C10d(), Ranks(environ=TORCHRUN)
    process.get_rank = lambda: 1 / 0
    with torch_of(process), caplog.at_level(logging.WARNING):
        ranks.start()
        process.init(0, 2, Store())
        ranks.stop()
    assert "ranks are not linked" in caplog.text
    assert ranks.state() == {"ranks": "off: the process group could not be asked: ZeroDivisionError: division by zero"}


def test_a_forked_child_is_no_rank_until_it_joins():
    """Its memory holds the parent's process group, whose ids it must not use; a group of its own counts."""
    process, ranks, store = C10d(), Ranks(environ={}), Store()
    with torch_of(process):
        ranks.start()
        process.init(0, 2, store)
        ranks.after_fork()
        ranks.look()
        assert ranks.step_ids(0) is None
        assert "service.instance.id" not in ranks.attributes()
        process.init(1, 3, Store())
        assert ranks.attributes()["service.instance.id"] == f"{ranks.run.run_id}/1"
        ranks.stop()


def test_silence_is_told_of_when_it_turns_out():
    """A rank that learns only from torch that it does not export is told so, once."""
    reported: list[bool] = []
    ranks = joined(1, 2, Store(), "one", on_not_exporting=lambda: reported.append(True))
    assert reported == [True]
    assert ranks.not_exporting_reason == "rank 1 of 2 does not export: export_ranks is 'one'"
    assert joined(0, 2, Store(), "one", on_not_exporting=lambda: reported.append(False)).not_exporting_reason is None
    assert (
        Ranks("one", environ=TORCHRUN, on_not_exporting=lambda: reported.append(False)).not_exporting_reason is not None
    )
    assert reported == [True]


@pytest.mark.parametrize(
    ("choice", "layout", "expected"), [("all", "together", 4), (0.5, "together", 2), ("all", "apart", 1)]
)
def test_the_budget_of_a_trace_is_shared_by_those_who_write_it(choice, layout, expected):
    """Together it is divided among the ranks that export; apart each has its own."""
    assert joined(0, 4, Store(), choice, layout).budget_share == expected


def test_links_of_collectives_go_to_ranks_that_export():
    """A rank that exports nothing has no span to link to."""
    process = C10d()
    process.init(0, 8, Store())
    environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for choice, expected in (("all", (3, 4, 7)), ("node", (4,)), ("one", ())):
        ranks = Ranks(choice, environ=environ)
        with torch_of(process):
            ranks.look()
        assert ranks.linked_ranks((0, 3, 4, 7)) == expected
        assert ranks.linked_ranks((3, 4)) == ()  # a group of others


def test_groups_are_named_as_the_program_does():
    """The world is left out, and so are groups of others; those that come later are found, those that go are kept."""
    process = C10d()
    process.init(1, 8, Store())
    ranks = Ranks(environ={})
    with torch_of(process):
        ranks.look()
    assert "torch.distributed.groups" not in ranks.attributes()
    process.add_group("1", "undefined", (1, 2))
    process.add_group("2", "mesh_tp", (0, 1, 2, 3))
    process.add_group("3", "mesh_dp", (2, 6))
    assert ranks.attributes()["torch.distributed.groups"] == ("1:1-2", "mesh_tp:0-3")
    process._world.pg_names.clear()
    assert ranks.attributes()["torch.distributed.groups"] == ("1:1-2", "mesh_tp:0-3")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((3,), "3"),
        ((0, 1, 2, 3, 8), "0-3,8"),
        ((0, 4, 8, 12), "0-12/4"),
        ((1, 5), "1,5"),
        ((2, 0, 1), "0-2"),
        (tuple(x + x // 3 for x in range(600)), None),
    ],
)
def test_ranges(ranks, expected):
    """Short to read, and never longer than 200 characters."""
    found = ranges(ranks)
    assert found == expected if expected else len(found) == 200


def test_the_programs_own_attributes_win():
    """What a program says of itself stays; the rest is added, and the resource is one object as long as nothing changes."""
    ranks = joined(0, 2, Store())
    own = Resource({"service.instance.id": "mine", "service.name": "s"}, "https://example.com/schema")
    found = ranks.resource(own)
    assert found is ranks.resource(own)
    assert found.attributes == {**ranks.attributes(), **own.attributes}
    assert found.schema_url == own.schema_url


def test_the_provider_takes_the_ids_of_steps_from_the_ranks():
    """The sampler is asked with the derived trace id; what is no step, and a process alone, has the generator's."""
    store = Store()
    first, second = (joined(rank, 2, store, "all", "together") for rank in (0, 1))
    root, child = (
        Provider(TracerProvider(shutdown_on_exit=False), ranks).new_trace("torch.step", 3, None)
        for ranks in (first, second)
    )
    assert (root.trace_id, root.span_id, root.parent) == (*first.step_ids(3)[:2], None)
    assert child.trace_id == root.trace_id
    assert (child.parent.trace_id, child.parent.span_id, child.parent.is_remote) == (root.trace_id, root.span_id, True)
    provider = Provider(TracerProvider(shutdown_on_exit=False), first)
    assert provider.new_trace("other", -1, None).span_id == 0
    assert provider.resource.attributes["torch.distributed.rank"] == 0
    assert provider.budget_share == 2
    assert Provider(TracerProvider(shutdown_on_exit=False)).budget_share == 1


def test_a_rank_that_does_not_export_records_nothing(monkeypatch):
    """Told so by its launcher it does not even begin; health says why, also where the setting is the environment's."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    processor = otp.TorchSpanProcessor()
    provider = new_provider(processor)
    monkeypatch.setenv("OTEL_TORCHPROF_RANKS", "export=one")
    with instrumented(provider, skip_dep_check=True) as instrumentor:
        assert instrumentor.health.sources == {"recording": "off: rank 1 of 2 does not export: export_ranks is 'one'"}
        assert processor.health.sources["recording"].startswith("off")
        assert otp.rank_resource().attributes["torch.distributed.rank"] == 1
        assert otp.step_context(0, 0) is None


def test_a_rank_that_turns_out_not_to_export_stops():
    """Where only the process group tells the rank, recording ends there, nothing stays in torch, and health says why."""
    process = C10d()
    provider = new_provider(otp.TorchSpanProcessor())
    with torch_of(process), instrumented(provider, skip_dep_check=True, export_ranks="one") as instrumentor:
        assert instrumentor.health.sources["recording"] == "on"
        process.init(1, 2, Store())
        for thread in threading.enumerate():
            if thread.name == "otel-torchprof-silence":
                thread.join(60)
        assert instrumentor.health.sources == {"recording": "off: rank 1 of 2 does not export: export_ranks is 'one'"}
        assert process._update_default_pg.__func__ is C10d._update_default_pg


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("export_ranks", "some", "export_ranks is 'some'; allowed are all, node, one, and a share above 0, up to 1"),
        ("ranks", "beside", "ranks is 'beside'; it must be one of 'apart', 'together'"),
    ],
)
def test_bad_options(option, value, message):
    """The exception names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        otp.TorchInstrumentor().instrument(skip_dep_check=True, **{option: value})


def test_resources_of_other_signals(monkeypatch):
    """Where the environment asks for the detector, the SDK's own resource has the rank, for metrics as well."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = RankResourceDetector().detect()
    assert found.attributes == {"torch.distributed.rank": 1, "torch.distributed.world_size": 2}
