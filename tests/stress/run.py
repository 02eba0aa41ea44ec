"""`make stress SECONDS=60`: rounds of random actions, each in a process of its own, which is watched from here.

The seed is printed; the rounds have the seeds that follow it, so that SEED=N of a failed round makes that one the first. The same seed
draws the same actions on each thread; how the threads take turns is the system's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import fault_server as faults  # noqa: E402
import grpc  # noqa: E402
import sanitized  # noqa: E402
from stacks import write_stacks  # noqa: E402

ROUND_SECONDS = 20.0
GRACE_SECONDS = {"plain": 150.0, "gevent": 150.0, "asan": 300.0, "tsan": 600.0}
"""What a round may take besides: to begin, and to end what is on its way."""
OUT = ROOT / "build" / "stress"


class Turns:
    """What a receiver of fault_server answers: one of these, at random, for ever."""

    def __init__(self, receiver: faults.Receiver, *turns: Any) -> None:
        self._receiver, self._turns = receiver, turns

    def pop(self, _: int) -> Any:
        """The next one."""
        del self._receiver.arrived[:-10]
        return random.choice(self._turns)


@contextlib.contextmanager
def receivers() -> Any:
    """Two receivers in this process that accept, refuse, hang and hang up: where to find them."""
    http, rpc = faults.HttpReceiver(), faults.GrpcReceiver()

    def late(handler: Any) -> None:
        http.ended.wait(3)
        handler.close_connection = True

    code = grpc.StatusCode
    http.turns = Turns(http, None, None, faults.status(503), faults.status(400), faults.raw(b"HTTP/1.1 2"), late)
    rpc.turns = Turns(rpc, None, None, faults.Abort(code.UNAVAILABLE), faults.Abort(code.INVALID_ARGUMENT))
    with http, rpc:
        yield http.url, rpc.url


def left_over(group: int, seconds: float) -> bool:
    """Whether processes of a round's are still there after so many seconds; they are ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return True


def failure_of_round(command: list[str], place: Path, environment: dict[str, str], log_path: Path, limit: float) -> str:
    """Runs one round; why it failed, or nothing."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            write_stacks(process.pid, log)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"did not end within {limit:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if left_over(process.pid, 90 if status == 0 else 0) and status == 0:
        return "left processes behind that did not end"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""


def prepared(flavour: str) -> tuple[Path, list[str], dict[str, str]]:
    """Where rounds of a flavour run, what goes before the interpreter, and the environment."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "PYTHONHASHSEED": "0",
        "NO_PROXY": "*",
    }
    place, command = ROOT, list[str]()
    if flavour not in {"plain", "gevent"}:
        copy = sanitized.sanitized_copy(flavour)
        place, command, environment = copy.place, list(copy.command), {**environment, **copy.environment}
    return place, command, {**environment, "PYTHONPATH": f"{place}:{place / 'tests' / 'helpers'}"}


def round_command(flavour: str, python: str, seed: int, seconds: float) -> list[str]:
    """What runs a round, but for where the receivers are."""
    program = "gevent_round.py" if flavour == "gevent" else "one_round.py"
    # TSan does not survive a fork, and sees races in gRPC, whose C++ library is not instrumented. A child that gevent forked goes
    # on with all greenlets of its parent, and gRPC waits in C for what no greenlet can do meanwhile.
    more = {"tsan": ["--no-forks"], "asan": ["--asan"], "gevent": ["--no-forks", "--greenlets"]}
    return [python, f"tests/stress/{program}", str(seed), f"{seconds:.1f}", *more.get(flavour, [])]


def main() -> int:
    """Rounds until the time is over; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--flavour", choices=GRACE_SECONDS, default="plain")
    parser.add_argument("--version", default="", help="of Python, of one in .venv/interpreters, which has no torch")
    parser.add_argument("--go-on", action="store_true", help="after a failed round too")
    given = parser.parse_args()
    python = (
        str(Path(sys.prefix) / "interpreters" / given.version / "bin" / "python") if given.version else sys.executable
    )
    place, before, environment = prepared(given.flavour)
    OUT.mkdir(parents=True, exist_ok=True)
    end, seed, failed = time.monotonic() + given.seconds, given.seed, 0
    say(f"seed {seed}, {given.flavour}, Python {given.version or sys.version.split()[0]}")
    with receivers() as (http_url, grpc_url):
        while (left := end - time.monotonic()) > 0 and (given.go_on or not failed):
            seconds = min(ROUND_SECONDS, max(left, 5.0))
            log = OUT / f"{given.flavour}-{seed}.log"
            command = [*before, *round_command(given.flavour, python, seed, seconds), "--http", http_url]
            command += ["--grpc", grpc_url] if given.flavour in {"plain", "asan"} else []
            why = failure_of_round(command, place, environment, log, seconds + GRACE_SECONDS[given.flavour])
            say(f"  seed {seed}: {why or 'pass'}")
            if why:
                failed += 1
                say(log.read_text(errors="replace")[-20_000:])
                flavour = "" if given.flavour == "plain" else f" FLAVOUR={given.flavour}"
                version = f" VERSION={given.version}" if given.version else ""
                say(f"  all of it: {log}\n  again: make stress SEED={seed} SECONDS={seconds:.0f}{flavour}{version}")
            seed += 1
    return 1 if failed else 0


def say(text: str) -> None:
    """A line on the screen, now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
