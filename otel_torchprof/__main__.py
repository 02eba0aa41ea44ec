"""``python -m otel_torchprof``: the command ``otel-torchprof``."""

import sys

from ._cli.main import main

sys.exit(main())
