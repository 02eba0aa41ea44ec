"""Averages by module: they add up to those of all events, and are the same from every file."""

from __future__ import annotations

import json
import threading

import pytest
from checked_json import checked
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from kineto_events import cuda_trace, event, kernel  # noqa: E402
from module_events import Net  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._cli import main as cli  # noqa: E402

X = torch.ones(2, 4)
ALL = {"profile_memory": True, "with_flops": True}
OPTIONS = {
    "modules": {"with_modules": True, **ALL},
    "calls": {"with_stack": True, **ALL},
    "both": {"with_modules": True, "with_stack": True, **ALL},
}


@pytest.fixture(scope="module")
def train():
    """A training step of a small transformer, whose linear layer is used twice."""
    torch.manual_seed(0)
    head = nn.Linear(16, 16)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), head, nn.ReLU(), head)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        with otp.record_function("step"):
            loss = model(torch.randn(2, 8, 16)).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def rows(averages):
    """What an average by module says; times in whole ns."""
    return {
        average.key: (
            average.count,
            round(average.cpu_time_total * 1000),
            round(average.self_cpu_time_total * 1000),
            average.cpu_memory_usage,
            average.self_cpu_memory_usage,
            average.flops,
            average.self_flops,
            average.module,
            average.is_backward,
        )
        for average in averages
    }


def of_modules(body, **options):
    """The averages by module of a body."""
    with otp.profile(**{"with_modules": True, **options}) as prof:
        body()
    return rows(prof.key_averages(group_by_module=True))


# ---- they add up ----


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sums_over_modules_are_those_of_all_events(train, options):
    """Self times add up to the recorded time, own memory and FLOPs to those of all events, and a total is its own and what is inside."""
    with otp.profile(**options) as prof:
        for _ in range(2):
            train()
    modules, events = prof.key_averages(group_by_module=True), prof.key_averages(include_python_functions=True)
    by_key = {average.key: average for average in modules}
    columns = prof.columns
    top = columns["parent"] < 0
    whole = int((columns["end"] - columns["start"])[top].sum())
    assert round(sum(average.self_cpu_time_total for average in modules) * 1000) == whole
    assert sum(average.self_flops for average in modules) == sum(average.flops for average in events) > 0
    own = sum(average.self_cpu_memory_usage for average in modules)
    assert own == sum(average.self_cpu_memory_usage for average in events)
    for tail in ("", " (backward)"):
        parts = [average for average in modules if average.module and average.is_backward == bool(tail)]
        assert round(by_key["Sequential" + tail].cpu_time_total * 1000) == round(
            sum(average.self_cpu_time_total for average in parts) * 1000
        )
        assert by_key["Sequential" + tail].flops == sum(average.self_flops for average in parts)
        assert by_key["Sequential" + tail].cpu_memory_usage == sum(average.self_cpu_memory_usage for average in parts)
    assert by_key["Sequential"].cpu_memory_peak == max(
        average.cpu_memory_peak for average in modules if not average.is_backward and average.module
    )
    # The linear layer is one module, called four times, with the FLOPs of four: 2 * 16 * 16 * 16 each.
    assert (by_key["Sequential.1"].count, by_key["Sequential.1"].flops) == (4, 4 * 2 * 16 * 16 * 16)
    # The backward pass has two products for one, and adds the gradients of the two calls of each step.
    assert by_key["Sequential.1 (backward)"].flops == 2 * 4 * 2 * 16 * 16 * 16 + 2 * (16 * 16 + 16)
    assert by_key["Sequential"].count == 2
    assert "Sequential.0.self_attn" in by_key


def test_names_are_those_of_modules_and_of_calls(train):
    """Calls of modules that the tracer of Python records have the names of module events, and their class, too."""
    found = {}
    for name, options in OPTIONS.items():
        with otp.profile(**options) as prof:
            train()
        found[name] = prof.key_averages(group_by_module=True)
    keys = {name: [(each.key, each.count, each.flops) for each in averages] for name, averages in found.items()}
    assert keys["modules"] == keys["calls"] == keys["both"]
    classes = {each.module: each.module_class for each in found["calls"]}
    assert classes["Sequential.1"] == "Linear"
    assert classes["Sequential.0.self_attn"] == "MultiheadAttention"


def test_the_table(train):
    """The table has torch's columns; sorting and the limit are those of other averages."""
    with otp.profile(**OPTIONS["modules"]) as prof:
        train()
    averages = prof.key_averages(group_by_module=True)
    text = averages.table(sort_by="flops", row_limit=3)
    lines = [line.split()[0] for line in text.splitlines() if line.startswith(" ")]
    largest = sorted((average for average in averages), key=lambda average: -average.flops)[:3]
    assert [line for line in lines if line != "Name"] == [average.key.split()[0] for average in largest]
    assert "CPU Mem" in text
    assert len(averages.to_pandas()) == len(averages)


def test_long_names_keep_their_ends(train):
    """What tells modules apart is the end of their path, and it is what a narrow column keeps."""
    with otp.profile(**OPTIONS["modules"]) as prof:
        train()
    averages = prof.key_averages(group_by_module=True)
    lines = averages.table(max_name_column_width=20).splitlines()
    names = {line[:20] for line in lines}
    assert {"...ntial.0.self_attn", "...f_attn (backward)"} < names
    assert max(map(len, names)) == 20


# ---- which modules there are ----


class Recursive(nn.Module):
    """Calls itself, then a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, x, times):
        return self(x, times - 1) if times else self.inner(x)


def test_a_module_in_itself_counts_once():
    """A total has the time of a call inside a call of the same module once, and all calls are counted."""
    with otp.profile(with_modules=True) as prof:
        Recursive()(X, 3)
    outer = int((prof.columns["end"] - prof.columns["start"])[0])
    found = rows(prof.key_averages(group_by_module=True))
    assert list(found) == ["Recursive", "Recursive.inner"]
    assert found["Recursive"][:2] == (4, outer)
    assert found["Recursive"][2] + found["Recursive.inner"][2] == outer
    assert found["Recursive.inner"][0] == 1


def test_containers_and_parts():
    """A container without a forward is no module that runs; a part that is called alone has its name in the model."""
    model = Net()
    found = of_modules(lambda: (model(X), model.encoder(X)))
    assert [key for key in found if "layers" not in key] == [
        "Net",
        "Net.encoder",
        "Net.head",
        "Net.head.0",
        "Net.head.1",
        "encoder",
    ]
    assert "Net.encoder.layers" not in found
    assert found["Net.encoder.layers.0"][0] == 1


def test_the_forward_pass_that_runs_again():
    """What a checkpoint runs again in the backward pass is calls of its modules; the backward pass is that of both."""
    model, inputs = Net(), torch.ones(2, 4, requires_grad=True)
    found = of_modules(lambda: checkpoint(model, inputs, use_reentrant=False).sum().backward())
    assert found["Net.head.0"][0] == 2
    assert found["Net.head.0 (backward)"][0] >= 1
    plain = of_modules(lambda: model(inputs).sum().backward())
    assert plain.keys() - {"(no module)"} <= found.keys()


def test_modules_of_several_threads():
    """Each thread has its own modules around its operators; one entry sums the calls of all threads."""
    model, barrier = Net(), threading.Barrier(3)

    def run():
        barrier.wait(60)
        for _ in range(5):
            model(X).sum().backward()

    def body():
        in_threads(run, run, run)

    with otp.profile(with_modules=True, all_threads=True, profile_memory=True) as prof:
        body()
    found, alone = rows(prof.key_averages(group_by_module=True)), of_modules(lambda: model(X).sum().backward())
    assert {found[key][0] for key in ("Net", "Net.encoder", "Net.encoder.layers.0", "Net.head.0")} == {15}
    assert found["Net (backward)"][0] == 15 * alone["Net (backward)"][0] > 0
    columns = prof.columns
    top = columns["parent"] < 0
    assert sum(row[2] for row in found.values()) == int((columns["end"] - columns["start"])[top].sum())


# ---- errors ----


def test_what_cannot_be_grouped_by_module():
    """Without modules the error says what to record; another grouping and an edited list are refused."""
    with otp.profile() as prof:
        Net()(X)
    with pytest.raises(RuntimeError, match="with_modules=True"):
        prof.key_averages(group_by_module=True)
    with otp.profile(with_modules=True) as prof:
        Net()(X)
    with pytest.raises(ValueError, match="leave out the other"):
        prof.key_averages(group_by_input_shape=True, group_by_module=True)
    events = prof.events()
    del events[0]
    with pytest.raises(RuntimeError, match="was changed"):
        events.key_averages(group_by_module=True)


# ---- the same from files ----


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.otlp", "t.jsonl"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_files_have_the_averages_of_their_profile(train, tmp_path, options, name):
    """Averages by module are those of the profile that wrote the file; OTLP has no memory outside of events."""
    with otp.profile(**options) as prof:
        for _ in range(2):
            train()
            prof.step()
    if ".json" in name and "jsonl" not in name:
        prof.export_chrome_trace(tmp_path / name)
    else:
        prof.export_otlp(tmp_path / name, detail="frames" if "with_stack" in options else "ops")
    expected, found = (
        rows(prof.key_averages(group_by_module=True)),
        rows(otp.load(tmp_path / name).key_averages(group_by_module=True)),
    )
    outside = expected.pop("(no module)"), found.pop("(no module)")
    assert found == expected
    assert outside[0][:3] == outside[1][:3]
    assert outside[0] == outside[1] or "otlp" in name or "jsonl" in name


def test_modules_outside_of_the_tree(tmp_path):
    """A module that a forward makes has the same name in files, though these do not say that it is no part of the model."""

    class Makes(nn.Module):
        def forward(self, x):
            return nn.Softmax(dim=-1)(x)

    with otp.profile(with_modules=True) as prof:
        nn.Sequential(Makes())(X)
    prof.export_chrome_trace(tmp_path / "t.json")
    prof.export_otlp(tmp_path / "t.otlp")
    found = [
        rows(each.key_averages(group_by_module=True))
        for each in (prof, otp.load(tmp_path / "t.json"), otp.load(tmp_path / "t.otlp"))
    ]
    assert list(found[0]) == ["Sequential", "Sequential.0", "Sequential.0.Softmax"]
    assert found[0] == found[1] == found[2]


def test_a_trace_of_torch(train, tmp_path):
    """Calls of modules in torch's own trace are the modules, by torch's names and numbers."""
    with torch.profiler.profile(with_stack=True) as prof:
        train()
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    found = otp.load(tmp_path / "t.json").key_averages(group_by_module=True)
    by_key = {average.key: average for average in found}
    assert by_key["nn.Module: Sequential_0"].count == 1
    linear = [average for average in found if average.module_class == "Linear" and not average.is_backward]
    assert sorted(average.count for average in linear) == [1, 1, 2]
    assert any(average.key == "nn.Module: LayerNorm_0 (backward)" for average in found)


@pytest.mark.parametrize("exporter", [otp.ChromeTraceExporter, otp.OTLPFileExporter])
def test_show_by_module(train, tmp_path, capsys, exporter):
    """``show --by module`` prints the averages by module of an instrumentation's file, as a table and as JSON."""
    path = str(tmp_path / "t.json")
    with otp.stream(exporter(path), record_shapes=True) as streamed:
        for _ in range(3):
            train()
            streamed.step()
    expected = {row.key: row for row in streamed.key_averages()}
    assert cli.main(["show", "-q", "--by", "module", "--json", path]) == 0
    found = {row["key"]: row for row in checked("show", capsys.readouterr().out)}
    assert found["Sequential"]["count"] == expected["Sequential"].count == 3
    assert found["Sequential"]["cpu_time_total"] == pytest.approx(expected["Sequential"].cpu_time_total)
    assert found["Sequential.1"]["count"] == expected["1"].count == 6
    assert found["Sequential.1 (backward)"]["module"] == "Sequential.1"
    assert cli.main(["show", "-q", "--by", "module", "--sort", "count", "--rows", "1", path]) == 0
    table = capsys.readouterr().out
    assert "Sequential (backward)" in table
    assert "Sequential.1" not in table
    assert cli.main(["show", "-q", "--json", path]) == 0
    named = {row["key"]: row for row in checked("show", capsys.readouterr().out)}
    assert named["aten::mm"]["count"] == expected["aten::mm"].count


def test_show_by_shape(tmp_path, capsys):
    """``show --by shape`` prints operators of each input shape apart, as ``key_averages`` does, as a table and as JSON."""
    path = str(tmp_path / "t.json")
    with otp.profile(record_shapes=True) as prof:
        Net()(X)
        Net()(X[:1])
    prof.export_chrome_trace(path)
    expected = {(row.key, str(row.input_shapes)): row.count for row in prof.key_averages(group_by_input_shape=True)}
    assert cli.main(["show", "-q", "--by", "shape", "--json", path]) == 0
    found = checked("show", capsys.readouterr().out)
    assert {(row["key"], row["input_shapes"]): row["count"] for row in found} == expected
    assert cli.main(["show", "-q", "--by", "shape", "--rows", "1", path]) == 0
    assert "Input Shapes" in capsys.readouterr().out


def test_show_says_what_it_cannot(tmp_path, capsys):
    """A file without modules or shapes, keys of modules for names, and steps by module are errors that say the way out."""
    path = str(tmp_path / "t.json")
    with otp.profile() as prof:
        Net()(X)
    prof.export_chrome_trace(path)
    for arguments, message in (
        (["--by", "module"], "t.json': no calls of modules were recorded: use profile(with_modules=True)"),
        (["--by", "shape"], "t.json': no input shapes were recorded: use profile(record_shapes=True) or run --shapes"),
        (["--sort", "flops"], "needs --by module"),
        (["--by", "module", "--steps"], "use one of them"),
    ):
        assert cli.main(["show", "-q", *arguments, path]) == 1
        assert message in capsys.readouterr().err


# ---- devices ----


def test_device_times_add_up(tmp_path):
    """Kernels count for the module that launched them and those around it; what nothing launched is in no module, also in the total."""
    calls = [
        event("nn.Module: Net_0", 1, 22, cat="python_function"),
        event("nn.Module: Linear_0", 1, 20, cat="python_function"),
    ]
    lost = kernel("lost", 160, 7, 99, 93)
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [*calls, *cuda_trace(), lost]}))
    loaded = otp.load(tmp_path / "t.json")
    averages = loaded.key_averages(group_by_module=True)
    found = {average.key: (average.self_device_time_total, average.device_time_total) for average in averages}
    linear, net = "nn.Module: Linear_0", "nn.Module: Net_0"
    assert found == {net: (0, 120), linear: (120, 120), "(no module)": (12, 12)}
    assert "Self CUDA time total: 132.000us" in averages.table()
    assert "Self CUDA time total: 132.000us" in loaded.key_averages().table()
