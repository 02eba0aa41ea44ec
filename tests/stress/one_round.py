"""One round of `make stress`: random actions on random threads for some seconds, then everything has to be off."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib.util
import logging
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import actions
import exports
import profiles
from opentelemetry.sdk.resources import Resource
from stacks import write_stacks
from world import Worker, World

import otel_torchprof as otp
from otel_torchprof._native.recorder import recorder_stats

HAS_TORCH = importlib.util.find_spec("torch") is not None
ANY_THREAD = sys.version_info[:2] != (3, 11)
"""Whether a thread that waits may be given an exception: with any profile function CPython 3.11 lets all other threads go
round in a circle at the entry of their next function (DO_TRACING handles RESUME anew while the eval breaker is set) until that
thread has taken it, which it never does where it waits for one of them."""
COLD_THREADS = 8
JOIN_SECONDS = 120.0
"""For what is on its way when a round is over."""


def chosen_weights(world: World, rng: random.Random, names: list[str]) -> None:
    """Everything is on, and each round has its favourites: faults that need few threads and one action are not drowned."""
    for name in names:
        world.weights[name] = rng.choice([0.2, 1.0, 1.0, 5.0])
    world.weights["forked"] = 0.2 if world.forks else 0.0
    if world.greenlets:
        world.weights["yielding"] = 5.0


def warm_up(world: World) -> None:
    """Each action once: imports what is imported at first use, which takes minutes with a collection at every allocation."""
    world.until = math.inf
    world.weights = {"labels": 1.0}
    worker = Worker(world, "first")
    for name, action in world.actions.items():
        begun = time.monotonic()
        action(worker)
        print(f"first {name}: {time.monotonic() - begun:.1f} s")  # noqa: T201
    world.tools = int(world.greenlets)  # a call of one greenlet ends during a call of another


def begin_cold(world: World) -> None:
    """Nothing was used yet: several threads do it first, together."""
    world.until = math.inf
    world.weights = {"labels": 1.0}
    first = ("profiled", "instrumented", "streamed")
    together = threading.Barrier(COLD_THREADS)

    def begin(number: int) -> None:
        worker = Worker(world, f"cold{number}")
        together.wait()
        try:
            with otp.profile(
                record_shapes=True, profile_memory=HAS_TORCH and number % 2 == 0, with_stack=True, all_threads=True
            ):
                pass
            world.actions[first[number % len(first)]](worker)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the round's
            world.fail(f"a cold start failed: {error!r}")

    begun = [threading.Thread(target=begin, args=(number,), name=f"cold{number}") for number in range(COLD_THREADS)]
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()
    otp.TorchInstrumentor().uninstrument()


def interrupt(world: World, rng: random.Random, main: Worker, workers: dict[str, threading.Thread]) -> None:
    """Raises KeyboardInterrupt somewhere, again and again."""
    while not world.is_over:
        time.sleep(rng.choice([0.001, 0.01, 0.1, 0.5]))
        threads = list(workers.values())
        if threads and ANY_THREAD and rng.random() < 0.7:
            actions.interrupt_thread(rng.choice(threads))
        elif main.is_acting:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def reap(world: World) -> None:
    """Forgets the children that have ended, and notes those that did not end well or in time."""
    for child in list(world.children):
        status = child.status()
        if status is None and time.monotonic() > child.deadline:
            write_stacks(child.pid, sys.stderr)
            os.kill(child.pid, signal.SIGKILL)
            status = actions.HUNG
        if status is None:
            continue
        # gcc's ASan allocates under locks that no handler of forks takes: a child has them as another thread had (seen by gdb).
        if status and not (status == actions.HUNG and world.asan):
            world.fail(f"the forked child {child.pid} ended with status {status} ({actions.HUNG}: it hung)")
        world.children.remove(child)


def calm(world: World) -> None:
    """Takes collections and switches at every opportunity back after a second: what is on its way would take minutes."""
    while not world.is_over:
        time.sleep(1.0)
        gc.set_threshold(*actions.CALM_THRESHOLD)
        sys.setswitchinterval(actions.CALM_INTERVAL)


def acted(world: World, rng: random.Random, most: int) -> None:
    """Acts on this thread and up to so many others, which are replaced when they end, until the round is over."""
    main, workers = Worker(world, "main"), dict[str, threading.Thread]()
    if world.interrupts:
        signal.signal(signal.SIGINT, lambda _, frame: raise_interrupt(frame) if main.is_acting else None)
        threading.Thread(target=interrupt, args=(world, rng, main, workers), daemon=True, name="interrupts").start()
    threading.Thread(target=calm, args=(world,), daemon=True, name="calm").start()
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            main.is_acting = False  # an interrupt may have come before it was said
            if world.is_over:
                break
            filled(world, workers, most)
            main.run_one()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def filled(world: World, workers: dict[str, threading.Thread], most: int) -> None:
    """Begins as many workers as have ended, and looks after children."""
    for name in [name for name, thread in workers.items() if not thread.is_alive()]:
        del workers[name]
    while len(workers) < most:
        world.begun += 1
        name = f"worker{world.begun}"
        workers[name] = threading.Thread(target=Worker(world, name).run, name=name)
        workers[name].start()
    reap(world)


def raise_interrupt(frame: Any) -> None:
    """From a handler."""
    if actions.is_fair(frame):
        raise KeyboardInterrupt


def joined(world: World) -> bool:
    """Waits for all threads that Python knows and all children; whether they ended."""
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                world.fail(f"{thread} does not end")
                faulthandler.dump_traceback(all_threads=True)
                return False
    while world.children and time.monotonic() < deadline:
        reap(world)
        time.sleep(0.02)
    return True


def all_stopped(world: World, witness: Witness) -> None:
    """Stops and drops everything, and notes what is still on."""
    otp.TorchInstrumentor().uninstrument()
    for provider in world.providers:
        exports.shut_down(world, provider)
    world.providers.clear()
    for found in (*world.left_profiles, *world.streams):
        found.stop()
    world.left_profiles.clear()
    world.streams.clear()
    world.open_labels.clear()
    for _ in range(3):
        gc.collect()
    # Where an interrupt kept a stop from being made whole, the next one makes up for it.
    with otp.profile(with_stack=True, all_threads=True, with_modules=True):
        pass
    gc.collect()
    for where, found in (("the main thread", what_is_on(world)), ("a thread that lived all the round", witness.ask())):
        for what in found:
            world.fail(f"after everything was stopped, on {where}: {what}")


def what_is_on(world: World) -> list[str]:
    """What records, or would, on the calling thread."""
    found = {
        "recordings": recorder_stats().sessions,
        "profile function": sys.getprofile(),
        "threading's profile function": threading.getprofile(),
        "callbacks of the collector": [callback for callback in gc.callbacks if "otel" in repr(callback)],
        "instrumentation": otp.TorchInstrumentor().is_instrumented_by_opentelemetry,
    }
    if hasattr(sys, "monitoring"):
        found |= {f"monitoring tool {number}": sys.monitoring.get_tool(number) for number in range(6)}
    if HAS_TORCH:
        import torch_actions

        found |= torch_actions.what_is_on(world)
    return [f"{name}: {value!r}" for name, value in found.items() if value]


class Witness:
    """A thread that lives as long as the round, and says what is on there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked, self._found = threading.Event(), list[Any]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="witness")
        self._thread.start()

    def _run(self) -> None:
        self._asked.wait()
        self._found = what_is_on(self._world)

    def ask(self) -> list[str]:
        """What is on there, at the end."""
        self._asked.set()
        self._thread.join()
        return self._found


def main() -> int:
    """Runs the round that the arguments describe; 1 where something was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", default="", help="by default gRPC is left out")
    parser.add_argument("--no-forks", action="store_true")
    parser.add_argument("--asan", action="store_true")
    parser.add_argument("--greenlets", action="store_true", help="gevent has patched this process")
    given = parser.parse_args()
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        # Not both: an interrupt in one of the hooks around a fork leaves locks taken, those of logging among them.
        interrupts, forks = rng.choice([(True, False), (False, not given.no_forks)])
        interrupts = interrupts and not given.greenlets  # a greenlet's ident is not one that the interpreter knows
        # gRPC skips its own handlers of a fork while a thread is in it, and aborts in the child now and then (1.85, ev_epoll1_linux.cc).
        grpc = "" if forks else given.grpc
        world = World(given.seed, 0.0, Path(folder), given.http, grpc, forks, interrupts, given.asan, given.greenlets)
        return acted_round(world, rng, given.seconds)


def make_resource_once() -> None:
    """The SDK makes one with a pool of threads; an interrupt at the end of a `with` block of theirs leaves a lock taken for good."""
    resource = Resource.create()
    Resource.create = staticmethod(lambda *_, **__: resource)


def acted_round(world: World, rng: random.Random, seconds: float) -> int:
    """The round."""
    world.actions = {**actions.ACTIONS, **profiles.ACTIONS, **exports.ACTIONS}
    if HAS_TORCH:
        import torch_actions

        world.actions |= torch_actions.ACTIONS
    if world.greenlets:
        del world.actions["tasks"]  # asyncio has one running loop per thread of the system's
        world.actions.pop("kineto", None)  # without this package too, it crashes where greenlets take turns
    make_resource_once()
    world.watch_what_nobody_catches()
    witness = Witness(world)
    begin_cold(world)
    warm_up(world)
    chosen_weights(world, rng, list(world.actions))
    gc.collect()
    gc.freeze()
    world.until = time.monotonic() + seconds
    acted(world, rng, rng.choice([0, 1, 2, 5]))
    if joined(world):
        all_stopped(world, witness)
    print(dict(world.done.most_common()))  # noqa: T201 - kept beside the seed
    return 1 if world.failures else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    code = main()
    sys.stdout.flush()
    sys.exit(code)
