"""Calls of a program that is made anew for each of hundreds of profiles: nothing of it is kept, and no name is had twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slopes import lower_bound

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_BYTES = 200
"""Growth per cycle that is let pass: less than a code object, a function or a class. What is kept grows in each third of the
cycles; pages that the allocator takes late are in one of them."""

PROGRAM = """
import gc, os, sys, weakref
import otel_torchprof as otp
from otel_torchprof._native.recorder import recorder_stats

PAGE = os.sysconf("SC_PAGE_SIZE")

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE

MAKES

def cycle(operators):
    space = {}
    exec(MADE, space)
    points = [weakref.ref(each) for each in made(space)]
    with otp.profile(with_stack=True, operators=operators) as prof:
        space["run"]()
    assert len(prof.key_averages()) > 3
    assert any(event.name.endswith("): run") for event in prof.events())
    return points

kept = 0
for number in range(CYCLES):
    points = cycle(OPERATORS)
    gc.collect()
    kept += sum(point() is not None for point in points)
    if number == 10:
        gc.freeze()  # collections are quick from here on
    print(resident(), recorder_stats().names)
print(kept, len(points))
"""

WITHOUT_TORCH = '''
MADE = """
class Made:
    def method(self, numbers):
        return sorted(numbers, key=lambda number: -number)

    @classmethod
    def of_class(cls):
        return cls()

def closure(number):
    def inner():
        return number
    return inner

def generates():
    yield from map(lambda number: number, range(3))

def run():
    made = Made.of_class()
    return made.method([1, 2]), closure(1)(), list(generates()), made.__dir__()
"""

def made(space):
    functions = [space[name] for name in ("closure", "generates", "run")]
    return [space["Made"], *functions, *[function.__code__ for function in functions], space["Made"].method.__code__]
'''

WITH_TORCH = '''
import torch

torch.set_num_threads(1)
MADE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))

    def forward(self, x):
        return self.layers(x)

model = Net()
optimizer = torch.optim.Adam(model.parameters())

def run():
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
"""

def made(space):
    model = space["model"]
    objects = [space["Net"], space["optimizer"], space["run"], space["run"].__code__, space["Net"].forward.__code__]
    return [*objects, *model.modules(), *model.parameters()]
'''

PROGRAMS = {"without torch": (WITHOUT_TORCH, False, 2_000), "with torch": (WITH_TORCH, True, 200)}
"""What is made, whether operators are recorded, and how many times over: what is cheap has more of it to settle: in 600 the
allocator's late pages were a slope, one time in some thirty."""


@pytest.mark.parametrize("which", ["without torch", pytest.param("with torch", marks=pytest.mark.exhaustive)])
def test_nothing_of_a_program_is_kept(which):
    """Classes, functions, code, modules, parameters and optimizers die, names repeat, and resident memory has no slope."""
    makes, needs_torch, cycles = PROGRAMS[which]
    if needs_torch:
        pytest.importorskip("torch", minversion="2.6")
    program = PROGRAM.replace("MAKES", makes).replace("CYCLES", str(cycles)).replace("OPERATORS", str(needs_torch))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    *samples, (kept, looked_at) = [
        tuple(map(int, line.split())) for line in done.stdout.splitlines() if line[0].isdigit()
    ]
    assert (kept, len(samples)) == (0, cycles)
    assert looked_at >= 8
    assert samples[cycles // 10][1] == samples[-1][1]
    resident = [size for size, _ in samples]
    thirds = [resident[cycles // 3 : 2 * cycles // 3], resident[2 * cycles // 3 :]]
    assert min(map(lower_bound, thirds)) <= MOST_BYTES, resident


DEFINED = """
import ctypes, gc, weakref
from frame_trees import names_of, recorded

CALL = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)

class Definition(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("call", CALL), ("flags", ctypes.c_int), ("text", ctypes.c_char_p)]

class Owner:
    pass

new = ctypes.pythonapi.PyCFunction_NewEx
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
NO_ARGUMENTS = 4

def made(name):
    owner = Owner()
    owner.definition = Definition(name.encode(), CALL(lambda self, argument: None), NO_ARGUMENTS, None)
    owners.append(weakref.ref(owner))
    places.add(ctypes.addressof(owner.definition))
    return new(ctypes.addressof(owner.definition), owner, None)

def program():
    for number in range(50):
        made(f"made_{number}")()

owners, places = [], set()
for _ in range(3):
    program()
reused = len(places) < 150
owners.clear()
for _ in range(3):
    batch = recorded(program)
    names = names_of(batch)
    found = [name for name in names if "method made_" in name]
    print(reused, found == [f"<built-in method made_{number} of Owner object>" for number in range(50)])
    gc.collect()
print(sum(owner() is not None for owner in owners))
"""


def test_c_function_at_a_reused_address_has_its_own_name():
    """C functions whose definitions lie where another's was keep their names apart, and are let go at the stop."""
    done = subprocess.run(
        [sys.executable, "-c", DEFINED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "True"] * 3 + ["0"]
