"""``explain`` on real programs with one fault each, recorded with this package and with torch's profiler: the verdict, or none."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded
import pytest
from providers import instrumented, new_provider

torch = pytest.importorskip("torch", minversion="2.6")

import faulty_programs  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._instrument import live_recording  # noqa: E402

HERE = Path(__file__).parent
VERDICTS = {
    faulty_programs.control: (),
    faulty_programs.slow_loader: ("input-bound",),
    faulty_programs.slow_operator: ("operator-bound",),
    faulty_programs.gc_storm: ("gc-bound",),
    faulty_programs.checkpoints: ("checkpoint-bound",),
    faulty_programs.recompilation: ("compile-bound",),
}
"""By program, the faults that a recording of the instrumentation shows."""
OF_TORCH = {
    faulty_programs.control: (),
    faulty_programs.slow_loader: ("input-bound",),
    faulty_programs.slow_operator: ("operator-bound",),
    faulty_programs.gc_storm: ("python-gap",),
    faulty_programs.checkpoints: (),
    faulty_programs.recompilation: ("compile-bound",),
}
"""The same of a trace of torch's profiler, which does not say what collects garbage, nor what writes files."""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """As many threads as there surely are processors; and how busy the machine is, is not known.

    What is judged beside a busy machine is shown with made files.
    """
    monkeypatch.setattr(live_recording, "usage_at", lambda _event: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def verdicts(found):
    """Faults by name, those first that cost most."""
    return tuple(each.verdict for each in found.faults)


ATTEMPTS = 3
"""Of each program: a machine whose processors others use meanwhile is a fault of its own, which a recording can have."""


def named(program):
    return program.__name__


@pytest.mark.parametrize("program", VERDICTS, ids=named)
def test_what_this_package_recorded(program, tmp_path):
    """Each fault is named, and nothing is said of the program without one; from a Chrome file as from one of OTLP."""
    chrome, lines = tmp_path / "t.json.gz", tmp_path / "t.jsonl"
    for _ in range(ATTEMPTS):
        torch._dynamo.reset()  # nothing has been compiled yet: torch compiles a function eight times at most
        with otp.stream(otp.ChromeTraceExporter(chrome), otp.OTLPFileExporter(lines), detail="ops"):
            program(lambda: None, tmp_path)
        found = otp.explain(chrome)
        if verdicts(found) == VERDICTS[program]:
            break
    assert verdicts(found) == VERDICTS[program], found.headline
    assert found.steady_steps >= 50
    assert otp.explain(lines).headline == found.headline


@pytest.mark.parametrize("program", OF_TORCH, ids=named)
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_what_torchs_profiler_recorded(program, tmp_path):
    """What names prove is found in torch's own traces too, and what they do not prove is not claimed."""
    torch._dynamo.reset()
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=1000)
    with torch.profiler.profile(schedule=schedule) as prof:
        program(prof.step, tmp_path)
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    found = otp.explain(tmp_path / "t.json")
    assert verdicts(found) == OF_TORCH[program], found.headline


def test_what_run_says_at_the_end(tmp_path):
    """``run --explain`` gives the verdict on stderr, and leaves the program's output and exit status alone."""
    program = "import pathlib, faulty_programs\nfaulty_programs.slow_loader(lambda: None, pathlib.Path())\nraise SystemExit(3)"
    (tmp_path / "p.py").write_text(program)
    words = ("run", "-q", "--explain", "-o", "t.otlp", "p.py")
    paths = os.pathsep.join((str(HERE), str(HERE.parents[1])))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = preloaded.run(("-m", "otel_torchprof"), *words, environment=environment, folder=tmp_path, has_package=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(otp.explain(tmp_path / "t.otlp").findings[0].sentence)


def test_steps_whose_details_are_not_kept(tmp_path):
    """Where only slow steps keep their details, the operator is found in the sums of the others."""
    path = tmp_path / "t.otlp"
    with otp.stream(otp.OTLPFileExporter(path), detail="ops", policy=otp.SpanPolicy(keep="slow")):
        faulty_programs.slow_operator(lambda: None, tmp_path)
    assert verdicts(otp.explain(path)) == ("operator-bound",)


def test_what_a_processor_says_of_its_last_steps():
    """By phases alone, without a file, while it records and afterwards; without a step it says what to do."""
    processor = otp.TorchSpanProcessor()
    with pytest.raises(otp.TorchProfError, match="no step has ended yet"):
        processor.explain()
    with instrumented(new_provider(processor), detail="steps", skip_dep_check=True):
        faulty_programs.slow_loader(lambda: None, Path())
        found = processor.explain()
    assert verdicts(found) == ("input-bound",)
    assert found.steady_steps >= 50
    assert verdicts(processor.explain()) == verdicts(found)


def test_what_a_profile_recorded(tmp_path):
    """Profiles of this package have no phases either, and say the same as torch's; also without a file."""
    with otp.profile() as prof:
        faulty_programs.slow_loader(prof.step, tmp_path)
    prof.export_chrome_trace(tmp_path / "t.json")
    prof.export_otlp(tmp_path / "t.otlp")
    found = otp.explain(tmp_path / "t.json")
    assert verdicts(found) == ("input-bound",)
    of_file, of_profile = otp.explain(tmp_path / "t.otlp"), prof.explain()
    assert of_file.headline == found.headline
    assert str(of_profile) == str(of_file).replace("t.otlp", "the profile")
    assert of_profile.findings == of_file.findings
    assert (of_profile.phases, of_profile.step_median) == (of_file.phases, of_file.step_median)


def test_a_profile_without_steps():
    """What to do is said, and not the name of a file that nobody wrote."""
    with otp.profile() as prof:
        torch.ones(3).sin()
    with pytest.raises(otp.TorchProfError, match=r"^the profile has no steps: call prof.step\(\)"):
        prof.explain()
