"""``otel-torchprof doctor``: what is on, what is off and why, and the fix; without a secret."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .terminal import show

if TYPE_CHECKING:
    import argparse


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="report what is on, what is off and why, and the fix",
        description="Checks everything that recording and exporting need in this environment, and prints a fix for "
        "what is missing. Changes nothing, sends only an empty request to the receiver, and prints no "
        "header, credential or resource attribute. Exit status: 1 if there is a problem: something that "
        "was requested, for example by a variable, is off or wrong, or a receiver refuses the request; "
        "else 0, also if something that was not requested is off.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of name, state, text and fix")


def run(options: argparse.Namespace) -> int:
    """Prints it; 0 where all that was asked for is on, else 1."""
    from .doctor import NOTE, PROBLEM, checks

    found = []
    for check in checks():
        found.append(check)
        if not options.json:
            show(f"{'' if check.state == NOTE else check.state:<8} {check.name}: {check.text}\n")
            if check.fix:
                show(f"{'':<8}   fix: {check.fix}\n")
    if options.json:
        show(json.dumps([asdict(check) for check in found], indent=1) + "\n")
    problems = sum(check.state == PROBLEM for check in found)
    if not options.json:
        show(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}\n")
    return 1 if problems else 0
