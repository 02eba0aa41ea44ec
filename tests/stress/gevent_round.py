"""One round in a process that gevent patches: before the package is imported, or after it, as the seed has it."""

import random
import sys

from gevent import monkey

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    patch_first = random.Random(f"gevent {sys.argv[1]}").random() < 0.5
    if patch_first:
        monkey.patch_all()
    import one_round

    if not patch_first:
        monkey.patch_all()
    print("patched before the import" if patch_first else "patched after the import")  # noqa: T201 - kept beside the seed
    code = one_round.main()
    sys.stdout.flush()
    sys.exit(code)
