"""Reads malformed trace files with ``show`` and ``send``, many of them: ``make fuzz-readers``.

    python tests/fuzz_readers.py --inputs 1000000 --seed 7
    python tests/fuzz_readers.py --inputs 1 --seed 4711 --keep /tmp/found     one of them again, and its file

Each input has a number: the seed's, and one more with each. Exit status 1 when an input was not read as it must be.
"""

from __future__ import annotations

import argparse
import collections
import resource
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from malformed_files import check, malformed

MOST_MEMORY = 256 << 10
"""KiB."""
INPUTS_PER_LOOK = 50
WORDS = ((), ("--steps",), ("--rows", "-1"), ("--sort", "count", "--rows", "2"))


def main() -> int:
    """Runs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="number of the first input (default: a random one)")
    parser.add_argument("--keep", type=Path, help="folder for the files that were not read as they must be")
    options = parser.parse_args()
    seed = secrets.randbits(48) if options.seed is None else options.seed
    say(f"seed {seed}, {options.inputs:,} inputs")
    statuses: collections.Counter[tuple[int, int]] = collections.Counter()
    faults, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108
        path = Path(folder) / "input"
        for number in range(seed, seed + options.inputs):
            try:
                statuses[check(path, malformed(number), WORDS[number % len(WORDS)])] += 1
                if number % INPUTS_PER_LOOK == 0:
                    assert peak() < MOST_MEMORY, f"{peak() >> 10} MiB of memory, with this input or one shortly before"
            except Exception as error:  # noqa: BLE001 - whatever comes is what is looked for
                faults += 1
                say(f"--seed {number}: {type(error).__name__}: {str(error)[:500]}")
                if options.keep:
                    options.keep.mkdir(exist_ok=True)
                    shutil.copy(path, options.keep / str(number))
                if faults == 100 or peak() >= MOST_MEMORY:
                    break
            if (number - seed) % 50_000 == 49_999:
                report(statuses, faults, begin)
    report(statuses, faults, begin)
    return 1 if faults else 0


def report(statuses: collections.Counter[tuple[int, int]], faults: int, begin: float) -> None:
    """One line."""
    done, seconds = statuses.total() + faults, time.monotonic() - begin
    said = ", ".join(f"show {show} send {send}: {count:,}" for (show, send), count in sorted(statuses.items()))
    say(
        f"{done:,} inputs in {seconds:.0f} s ({done / seconds:.0f}/s), {peak() >> 10} MiB at most, {faults} faults; {said}",
    )


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def peak() -> int:
    """KiB that were resident at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
