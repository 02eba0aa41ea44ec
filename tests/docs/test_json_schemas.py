"""docs/schemas has a JSON schema of what each command prints with ``--json``, made from the types that it prints."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import generated
from jsonschema import Draft202012Validator
from test_command_line_page import subcommands

from otel_torchprof._answers import autopsy, difference, dumped, explanation, findings, running
from otel_torchprof._cli import doctor, show
from otel_torchprof._columns.samples import Call
from otel_torchprof._files import rank_state
from otel_torchprof._native.blackbox import Collective, Group

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
PLAIN = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
}


@dataclass(frozen=True, eq=False)
class With:
    """A class some of whose members are printed as others."""

    kind: type
    members: Mapping[str, Any]


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of values of a type as :func:`json.dumps` prints them; of a dictionary of types, of an object with these members."""
    if isinstance(kind, dict):
        return members(kind)
    if isinstance(kind, With):
        return members({**fields(kind.kind), **kind.members}, described(kind.kind), summary(kind.kind))
    if typing.get_origin(kind) is not None:
        return schema_of_generic(typing.get_origin(kind), typing.get_args(kind))
    if kind in PLAIN:
        return dict(PLAIN[kind])
    if issubclass(kind, Enum):
        return {"enum": [each.value for each in kind]}
    return schema_of(With(kind, {}))


def schema_of_generic(origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of values of a type with arguments."""
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    schemas = [schema_of(each) for each in arguments if each is not ...]
    if origin in {typing.Union, types.UnionType}:
        return {"anyOf": schemas}
    if origin is tuple and ... not in arguments:
        return {"type": "array", "prefixItems": schemas, "items": False, "minItems": len(schemas)}
    assert origin in {list, tuple, Sequence}, origin
    return {"type": "array", "items": schemas[0]}


def summary(kind: type) -> str:
    """The first line of the docstring of a class."""
    return inspect.cleandoc(str(kind.__doc__)).partition("\n")[0]


def members(types_by_name: Mapping[str, Any], texts: Mapping[str, str] | None = None, text: str = "") -> dict[str, Any]:
    """The schema of an object that has all members of a dictionary, and no others."""
    properties = {name: schema_of(each) for name, each in types_by_name.items()}
    for name, description in (texts or {}).items():
        if name in properties:
            properties[name]["description"] = description
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"description": text, **schema} if text else schema


def fields(kind: type) -> dict[str, Any]:
    """The types of the fields of a named tuple or dataclass."""
    assert is_dataclass(kind) or issubclass(kind, tuple), kind
    known = {"Sequence": Sequence, "Mapping": Mapping, "Collective": Collective, "Group": Group}
    return typing.get_type_hints(kind, localns={**vars(rank_state), **known})


def described(kind: type) -> dict[str, str]:
    """The docstrings of the fields of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = ROLE.sub(r"\1", " ".join(text.value.value.split())).replace("`", "")
    return texts


def averages(names: Sequence[str]) -> dict[str, Any]:
    """Averages with these members."""
    others = {
        "count": int,
        **dict.fromkeys(("key", "module", "module_class", "input_shapes"), str),
        "is_backward": bool,
    }
    return {name: others.get(name, float) for name in names}


class Printed(NamedTuple):
    """What a command prints."""

    text: str
    kinds: tuple[Any, ...]
    """Its type, or several types, of which it has one."""


RULES = Mapping[str, Any]
OF_ROUNDS = dict.fromkeys(("low", "high", "calls_before", "calls_after"), float | None)
CHANGES = list[With(difference.Change, OF_ROUNDS)]
PROBLEMS = list[str]
OF_STATE = fields(rank_state.RankState)
RENAMED = {"alive": "is_alive", "closed": "is_closed", "last": "last_ns", "since": "since_ns"}
RANK = {
    name: OF_STATE[RENAMED.get(name, name)]
    for name in (*RENAMED, "pid", "host", "has_box", "place", "last_ended", "killed")
}
RANK |= {"rank": int | None, "groups": list[Group]}
CALLS = list[With(running.OpenCall, {"kind": str})]
STEP = {name: kind for name, kind in fields(show.DisplayedStep).items() if name != "amounts"}
COMMANDS = {
    "autopsy": Printed(
        "Which rank hangs or died. Times are Unix ns; 0: not known. Members of ranks and groups may change between releases.",
        (
            {
                "waits": list[With(autopsy.Wait, {"group": str})],
                "transfers": list[With(Collective, {"rank": int, "peer": int, "more": int})],
                "mismatches": list[With(autopsy.Mismatch, {"group": str})],
                **dict.fromkeys(("cycle", "culprits", "missing", "ambiguous"), list[int]),
                "ranks": list[RANK],
            },
        ),
    ),
    "diff": Printed(
        "What changed between two recordings. Thresholds in rules may change between releases.",
        (
            {
                "verdict": str,
                "before": difference.ComparedRecording,
                "after": difference.ComparedRecording,
                **dict.fromkeys(("ratio", "common", "slowdown"), float),
                "interval": tuple[float, float],
                "changes": CHANGES,
                "unsure": CHANGES,
                **dict.fromkeys(("problems", "doubts", "caveats"), PROBLEMS),
                "rounds": difference.Rounds | None,
                "rules": RULES,
            },
        ),
    ),
    "doctor": Printed(
        "What is on, what is off and why. Names of checks may change between releases.", (list[doctor.Check],)
    ),
    "dump": Printed("What the threads of processes do. Times are Unix ns.", (list[dumped.ProcessDump],)),
    "explain": Printed(
        "Why training is slow. Times are seconds. Thresholds in rules and texts may change between releases; names of verdicts do not.",
        (
            {
                "verdict": str,
                "ranks": list[str],
                "steps": int,
                "left_out_steps": int,
                "steady_steps": int,
                "step_median_seconds": float,
                "findings": list[findings.Finding],
                "notes": list[findings.Finding],
                "abstentions": list[findings.Abstention],
                "phases": list[explanation.PhaseRow],
                "slow_steps": list[
                    With(explanation.SlowStep, {"more": Mapping[str, float], "counts": Mapping[str, int]})
                ],
                "problems": PROBLEMS,
                "knows_runnable": bool,
                "step_rule": str,
                "rules": RULES,
            },
        ),
    ),
    "show": Printed(
        "Averages (times in microseconds); with --by module or shape, those of modules, or of names with input shapes; with --steps, steps (ns); with --lines, sampled lines.",
        (
            list[averages(show._FIELDS)],
            *(list[averages(members)] for _, members in show._GROUPS.values()),
            list[
                {
                    **STEP,
                    **dict.fromkeys(("tokens", "samples", "flops"), int | None),
                    **dict.fromkeys(("mfu",), float | None),
                }
            ],
            {
                "samples": int,
                "seconds": float,
                "lines": list[
                    With(Call, {"share": float, "seconds": float, "samples": int, "called_from": Call | None})
                ],
            },
        ),
    ),
    "sql": Printed("The rows: an object each, with the columns of the query.", (list[RULES],)),
    "top": Printed(
        "What processes did in the last seconds. Times are Unix ns. Members may change between releases.",
        (list[With(running.ProcessView, {"threads": list[With(running.OpenThread, {"calls": CALLS})]})],),
    ),
}


def document(name: str) -> str:
    """The file of a command."""
    printed = COMMANDS[name]
    kinds = [schema_of(kind) for kind in printed.kinds]
    head = {"$schema": DIALECT, "title": f"otel-torchprof {name} --json", "description": printed.text}
    return json.dumps({**head, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}, indent=1) + "\n"


def test_schemas_are_up_to_date():
    """Each command with ``--json`` has a valid schema, that of the types that it prints."""
    parsers = subcommands().choices
    printing = {name for name, parser in parsers.items() if any("--json" in a.option_strings for a in parser._actions)}
    assert printing == COMMANDS.keys() == {path.stem for path in SCHEMAS.iterdir()}
    for name in COMMANDS:
        generated.check(SCHEMAS / f"{name}.json", document(name))
        Draft202012Validator.check_schema(json.loads(document(name)))
