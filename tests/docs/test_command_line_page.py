"""docs/command-line.md lists the commands and options that the parsers have."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import generated

from otel_torchprof._cli.main import _parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
GUIDES = {
    "run": "[Profile code](profile.md), [several ranks](ranks.md), [crashes](crashes.md)",
    "top": "[Training jobs](training.md#see-what-a-running-job-does)",
    "record": "[Training jobs](training.md#look-into-a-running-job)",
    "dump": "[Training jobs](training.md#see-what-a-running-job-does)",
    "show": "[Profile code](profile.md)",
    "explain": "[Training jobs](training.md), [how verdicts are reached](verdicts.md)",
    "diff": "[Training jobs](training.md)",
    "report": "[Profile code](profile.md#send-a-report)",
    "sql": "[Columns](columns.md#arrow-parquet-and-sql)",
    "mcp": "[Training jobs](training.md#ask-a-language-model)",
    "merge": "[Several ranks](ranks.md)",
    "convert": "[Profile code](profile.md)",
    "send": "[Backends](backends.md)",
    "recover": "[Crashes and hangs](crashes.md)",
    "autopsy": "[Crashes and hangs](crashes.md)",
    "doctor": "[Troubleshooting](troubleshooting.md)",
    "build": "[Install](install.md)",
}
"""Where each command is used."""
HEAD = """\
# Command line

`otel-torchprof COMMAND` and `python -m otel_torchprof COMMAND` are the same. `COMMAND --help` prints what this page says of a command.
Exit status 2 means wrong arguments, and 130 means that Ctrl-C ended the command; each command describes its others.

The test of this page makes it from the parsers; `make generated` writes it.
"""


def command_line_page() -> str:
    """The page, from argparse's actions: what argparse prints depends on the version of Python and on the terminal."""
    commands = subcommands()
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    table = [
        "| command | purpose |",
        "| --- | --- |",
        *(f"| [`{name}`](#{name}) | {cell(helps[name])} |" for name in commands.choices),
    ]
    sections = [section(name, parser) for name, parser in commands.choices.items()]
    return "\n".join([HEAD, *table, "", *sections])


def subcommands() -> argparse._SubParsersAction:
    """The commands of the program."""
    return next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """A command: what it does, how it is called, its arguments."""
    description, _, examples = parser.description.partition("\n\nexamples:\n")
    calls = [usage(name, parser), *(["", *(line.strip() for line in examples.splitlines())] if examples else [])]
    exclusive = [
        f"Only one of {', '.join(f'`{option_names(action)[-1]}`' for action in group._group_actions)} is allowed."
        for group in parser._mutually_exclusive_groups
    ]
    prints_json = any("--json" in action.option_strings for action in parser._actions)
    schema = [f"Schema of `--json`: [{name}.json](schemas/{name}.json)."] if prints_json else []
    return "\n".join(
        [
            f"## {name}",
            "",
            " ".join(description.split()),
            "",
            "```text",
            *calls,
            "```",
            "",
            "| argument | meaning |",
            "| --- | --- |",
            *(f"| {signature(action)} | {meaning(action)} |" for action in arguments(parser) if action.help),
            "",
            *(line for text in [*exclusive, *schema] for line in (text, "")),
            f"Guides: {GUIDES[name]}.",
            "",
        ]
    )


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those of a command, without ``--help``, which all have."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """One line, without the options that may be left out."""
    if parser.usage:
        return parser.usage
    required = [
        f"{option_names(action)[0]} {value(action)}"
        for action in parser._actions
        if action.option_strings and action.required
    ]
    positional = [places(action) for action in parser._actions if not action.option_strings]
    return " ".join(["otel-torchprof", name, *required, "[options]", *positional])


def places(action: argparse.Action) -> str:
    """A positional argument in the line of usage."""
    return {None: "{0}", "+": "{0} [{0} ...]", "*": "[{0} ...]", "?": "[{0}]"}[action.nargs].format(value(action))


def option_names(action: argparse.Action) -> list[str]:
    """The short name first."""
    return sorted(action.option_strings, key=len)


def value(action: argparse.Action) -> str:
    """What stands for the value of an argument; empty where it has none."""
    if action.nargs == 0:
        return ""
    if action.metavar:
        return str(action.metavar)
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def signature(action: argparse.Action) -> str:
    """An argument as one types it, in each of its forms."""
    return ", ".join(f"`{cell(f'{name} {value(action)}'.strip())}`" for name in option_names(action) or [""])


def meaning(action: argparse.Action) -> str:
    """The help of an argument, with its default where that is neither said nor obvious."""
    text = (action.help or "") % {"default": action.default, "prog": "otel-torchprof", "dest": action.dest}
    obvious = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
    default = "" if obvious or "default" in text else f" (default: {action.default})"
    return cell(f"{text}{default}{'; required' if action.option_strings and action.required else ''}")


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", text)


def test_command_line_page_is_up_to_date():
    """docs/command-line.md has every command and argument of the parsers, with their descriptions."""
    generated.check(PAGE, command_line_page())


def test_every_option_says_what_it_is():
    """Options have a help text; only files, whose names in the usage say it all, have none."""
    parsers = subcommands().choices
    assert [
        action.dest
        for parser in parsers.values()
        for action in arguments(parser)
        if not action.help and action.option_strings
    ] == []
