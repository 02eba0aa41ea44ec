"""Causes of verdicts, and the lines that they are in: a table of rules, and what they make of a finding."""

from __future__ import annotations

import re
import stat
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.samples import WAITS_FOR_LOCK, Call, is_own

from .advice import runs_much_besides
from .findings import BY_PHASE, COMPUTING, RULES, WAITING, busy_share, span, time
from .lines import own_calls, places, rows_in, text_of_call
from .steps import COUNTERS, PLACE_OF, SMALL_OPERATOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_torchprof._columns.arrays import Flags, Floats, Integers

    from .findings import Finding
    from .lines import LinePlace, Lines
    from .steps import Rank


# ---- the table ----


class Cause(NamedTuple):
    """A cause of a verdict. It holds if enough of the verdict's time is in matching calls or operators, or if a test says so."""

    name: str
    verdicts: frozenset[str]
    """Verdicts that it may explain."""
    sentence: str
    """What the program does, as the end of a sentence on a line."""
    advice: str
    check: str
    """Experiment that would refute it."""
    calls: str = ""
    """Pattern of one of the calls between the line and the interpreter's leaf: ``FILE FUNCTION``. ``source: TEXT`` is the text of
    the leaf's line, if its file is there and was not changed."""
    operators: str = ""
    """Pattern of the innermost operator."""
    least: float = 0.5
    """Least part of the verdict's time in these."""
    test: Callable[[Rank, Flags], bool] | None = None
    """Test of a rank and a mask of its steady steps, in place of patterns."""


_LEAST_OPERATORS = 300
_VARIATION = 3.0


def _has_small_operators(rank: Rank, chosen: Flags) -> bool:
    """Whether steps have many operators that take little time each."""
    count, seconds = (float(np.median(column[chosen])) for column in (rank.operations, rank.operating))
    return count >= _LEAST_OPERATORS and seconds <= SMALL_OPERATOR * count


def _has_busy_threads(rank: Rank, chosen: Flags) -> bool:
    """Whether other threads of the process take the processor from the loop's."""
    switches = rank.counters[chosen, COUNTERS.index("involuntary context switches")]
    return runs_much_besides(rank, chosen) and float(np.median(switches)) >= 1


def _has_changing_shapes(rank: Rank, chosen: Flags) -> bool:
    """Whether the fresh pages of memory of steps differ by much."""
    low, high = np.percentile(rank.counters[chosen, COUNTERS.index("minor page faults")], (10, 90))
    return bool(high >= _VARIATION * max(low, 1.0))


def _always(_rank: Rank, _chosen: Flags) -> bool:
    return True


GAPS = frozenset(("python-gap", "host-bound", "spikes"))
OF_LOOP = GAPS | {"operator-bound", "device-wait-bound"}
_ANYWHERE = OF_LOOP | {"input-bound", "optimizer-bound"}

_LET_GO = "move that thread's work into a process, or into code that lets go of the lock"

CAUSES = (
    Cause(
        "lock",
        _ANYWHERE,
        "it waits for Python's lock (GIL), which another thread has",
        _LET_GO,
        "run without that thread: if steps do not become shorter by that much, this is wrong",
        calls=rf"^{WAITS_FOR_LOCK} ",
    ),
    Cause(
        "sleep",
        _ANYWHERE,
        "it sleeps",
        "remove the wait, or let another thread wait",
        "remove the sleep in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"source: .*\bsleep\(|<built-in function sleep>",
    ),
    Cause(
        "deepcopy",
        _ANYWHERE,
        "it copies objects deeply, or averages the model's weights",
        "copy or average every so many steps, into tensors that exist: torch._foreach_copy_, torch._foreach_lerp_; "
        "AveragedModel(multi_avg_fn=get_ema_multi_avg_fn())",
        "leave the copy out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"\bcopy\.py _?deepcopy|swa_utils\.py |source: .*\bdeepcopy\(| (\w+_)?(ema|EMA)(_\w+)?$",
    ),
    Cause(
        "logging",
        _ANYWHERE,
        "it prints, logs or writes to a file",
        "log every so many steps, or from another thread (logging.handlers.QueueHandler)",
        "leave the call out in a trial run: if steps do not become shorter by that much, this is wrong",
        # A loop over tqdm(loader) has its iterator in every stack of the loader.
        calls=r"\blogging[/\\]\w+\.py |[/\\](loguru|wandb|mlflow|tensorboard|tqdm|rich)[/\\](?!.*[ .](__iter__|track)$)|"
        r" (\w+_)?(log|print)(_(metrics|step|loss|stats)\w*)?$|"
        r"source: .*(\bprint\(|\b(log|logger|logging)\.\w+\(|\.add_scalar\(|\bfsync\(|\.(flush|write|writelines|writerow)\()|"
        r"<built-in function (print|fsync)>|<built-in method (write|flush) ",
    ),
    Cause(
        "clipping",
        OF_LOOP | {"optimizer-bound"},
        "it clips or measures gradients, one after another",
        "torch.nn.utils.clip_grad_norm_(parameters, norm, foreach=True), and read the norm every so many steps",
        "leave clipping out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"clip_grad\.py | \w*(clip_?(grad|norm|value)|grad\w*_?(clip|norm))\w*$| (\w+_)?clip(ping)?$|source: .*\bclip_grad",
    ),
    Cause(
        "scheduler",
        OF_LOOP,
        "a scheduler computes",
        "compute the schedule ahead of time, or step it every so many steps",
        "leave scheduler.step() out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"lr_scheduler\.py |[Ss]chedul\w*\.py | \w*([Ss]chedul|learning_rate|(update|adjust)_lr)|source: .*\b\w*sched\w*\.step\(",
    ),
    Cause(
        "metrics",
        OF_LOOP,
        "it computes metrics",
        "compute metrics every so many steps, on tensors that stay on the device",
        "leave the metric out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"(^|[/\\])(torchmetrics|sklearn|torcheval|evaluate)[/\\]|metrics?\.py | \w*(accuracy|metric|f1_score|auroc|confusion|perplexity)\w*$|"
        r"source: .*\b\w*(accuracy|metric|f1_score|auroc|confusion|perplexity)\w*\(",
    ),
    Cause(
        "item",
        OF_LOOP | {"optimizer-bound"},
        "it reads values of tensors one by one, each of which waits for the device: .item(), .cpu(), float()",
        "keep values as tensors, and read them together every so many steps: torch.stack(values).tolist()",
        "leave the reads out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"source: .*(\.(item|tolist|cpu|numpy)\(|(?<![.\w])float\()|<built-in method (item|tolist|cpu|numpy|__float__|__bool__) ",
        operators=r"aten::(item|_local_scalar_dense|is_nonzero|equal)$",
        least=0.3,
    ),
    Cause(
        "synchronization",
        frozenset(("device-wait-bound",)),
        "it waits until the device has done all work",
        "remove the call; for timing use events: torch.cuda.Event(enable_timing=True)",
        "remove the call in a trial run: if steps do not become shorter, the device is what they wait for",
        calls=r" synchronize($|\n)|source: .*\bsynchronize\(",
    ),
    Cause(
        "gc-by-hand",
        frozenset(("gc-bound", "input-bound", "spikes")),
        "the program calls gc.collect()",
        "call gc.collect() less often: every so many hundred steps, or after evaluations",
        "leave the call out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"source: .*\bgc\.collect\(|<built-in function collect>",
        least=0.3,
    ),
    Cause(
        "workers",
        frozenset(("input-bound",)),
        "it waits for the loader's workers, which do not keep up",
        "raise num_workers and prefetch_factor, or make the dataset cheaper",
        "train on one batch again and again: if steps do not become shorter by that much, this is wrong",
        calls=r"dataloader\.py (_try_get_data|_get_data)|multiprocessing[/\\](queues|connection)\.py ",
    ),
    Cause(
        "waits",
        frozenset(("input-bound", "python-gap")),
        "it waits for another thread, a process or the network",
        "ask for what it waits for ahead of time, or for many at once: in threads, or in workers of a DataLoader",
        "let it return at once with data that is there: if steps do not become shorter by that much, this is wrong",
        calls=r"\A.*[/\\](threading\.py (wait|wait_for|acquire|join|_wait_for_tstate_lock)|queue\.py get|socket\.py |ssl\.py |"
        r"selectors\.py |subprocess\.py |_base\.py result)|source: .*\.(acquire|recv\w*|wait|communicate)\(",
    ),
    Cause(
        "collate",
        frozenset(("input-bound",)),
        "the loop's own thread puts samples together into batches",
        "raise num_workers of the DataLoader, or let the dataset return whole batches (batch_size=None, a BatchSampler as sampler)",
        "train on one batch again and again: if steps do not become shorter by that much, this is wrong",
        calls=r"_utils[/\\]collate\.py | \w*collate",
    ),
    Cause(
        "dataset",
        frozenset(("input-bound",)),
        "the loop's own thread makes its batches",
        "raise num_workers of the DataLoader, or make this line cheaper: decode and transform ahead of time",
        "train on one batch again and again: if steps do not become shorter by that much, this is wrong",
        calls=r"_utils[/\\]fetch\.py |dataloader\.py (_next_data|__next__)| __getitem__| __iter__",
    ),
    Cause(
        "optimizer-not-fused",
        frozenset(("optimizer-bound",)),
        "the optimizer updates one parameter after another",
        "construct the optimizer with fused=True or foreach=True",
        "construct it with fused=True in a trial run: if steps do not become shorter, this is wrong",
        calls=r" _single_tensor_",
    ),
    Cause(
        "conversions",
        frozenset(("operator-bound", *GAPS)),
        "tensors are converted to other types or copied to other devices",
        "convert once, ahead of the loop; create tensors with the type and on the device that they are used with",
        "leave the conversion out in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"source: .*\.(to|type|double|float|half|bfloat16|cuda|pin_memory)\(|<built-in method (to|type|double|float|half|bfloat16|cuda) ",
        operators=r"aten::(to|_to_copy|copy_|clone|contiguous|_pin_memory)$",
    ),
    Cause(
        "checkpoint-in-loop",
        frozenset(("checkpoint-bound",)),
        "the loop waits until the file is written",
        "write checkpoints less often, to a faster disk, or in the background (torch.distributed.checkpoint.async_save)",
        "turn checkpoints off in a trial run: if steps do not become shorter by that much, this is wrong",
        calls=r"[/\\]?serialization\.py |safetensors[/\\]|pickle|source: .*\bsave\w*\(",
    ),
    Cause(
        "gc-often",
        frozenset(("gc-bound",)),
        "new objects set it off",
        "call gc.freeze() after set-up, raise gc.set_threshold(), and keep fewer objects from step to step",
        "run with gc.disable(): if steps do not become shorter by that much, this is wrong",
        calls=r".",
    ),
    Cause(
        "changing-shapes",
        frozenset(("compile-bound",)),
        "shapes or arguments of calls change",
        "find out which with TORCH_LOGS=recompiles; pad inputs to few shapes, or mark the changing dimension as dynamic",
        "train on inputs of one shape: if the slow steps are still there, this is wrong",
        test=_always,
    ),
    Cause(
        "changing-sizes",
        frozenset(("allocation-churn",)),
        "the memory that steps take differs, as with inputs whose shape changes",
        "pad inputs to few shapes, or keep the largest tensors and use parts of them",
        "train on inputs of one shape: if steps do not become shorter, this is wrong",
        test=_has_changing_shapes,
    ),
    Cause(
        "first-touch",
        frozenset(("allocation-churn",)),
        "each step touches fresh pages",
        "keep large tensors from step to step (out=, in-place operators), or let the allocator keep them: MALLOC_TRIM_THRESHOLD_ and "
        "MALLOC_MMAP_THRESHOLD_ of glibc, or LD_PRELOAD of jemalloc or tcmalloc",
        "run with MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296: if steps do not become shorter, this is wrong",
        test=_always,
    ),
    Cause(
        "oversubscription",
        frozenset(("machine-busy",)),
        "threads of the process itself compete with the loop's",
        "set torch.set_num_threads() (OMP_NUM_THREADS), and num_workers where there is a DataLoader, so that all together are at most the "
        "cores that there are; in workers torch.set_num_threads(1)",
        "run with OMP_NUM_THREADS=1: if steps do not become shorter, this is wrong",
        test=_has_busy_threads,
    ),
    Cause(
        "small-operators",
        frozenset(("python-gap", "host-bound")),
        "each step is hundreds of short operators, between which Python runs",
        "torch.compile; operators on whole tensors in place of loops over parts; torch._foreach_ functions; a larger batch",
        "double the batch: if steps become longer by as much, this is wrong",
        test=_has_small_operators,
    ),
)
"""The causes. Of those that hold, the first is named."""


# ---- recognition ----

_LARGEST_SOURCE = 1 << 20
_UNIX = 10**18
"""Times from here on are Unix ns; those of some files are relative."""


def _source(file: str) -> tuple[int, list[str]]:
    """The time of the last change of a Python file, Unix ns, and its lines; none if it is not on this machine."""
    try:
        state = Path(file).stat()
        if not file.endswith(".py") or not stat.S_ISREG(state.st_mode) or state.st_size > _LARGEST_SOURCE:
            return 0, []
        return state.st_mtime_ns, _lines_at(file, state.st_mtime_ns)
    except (OSError, ValueError):
        return 0, []


@lru_cache(maxsize=64)
def _lines_at(file: str, _modified: int) -> list[str]:
    """The lines of a file, as of its last change: a program that is edited meanwhile, as from a notebook, is read again."""
    return Path(file).read_text(errors="replace").splitlines()


def _source_of(call: Call, recorded: int) -> str:
    """The text of the line of a call, in which only patterns are looked for; empty if its file changed since, or is not there."""
    modified, lines = _source(call.file)
    if not 0 < call.line <= len(lines) or (recorded > _UNIX and modified > recorded):
        return ""
    name = call.function.rpartition(".")[2]
    is_there = name.startswith("<") or any(f"def {name}(" in line for line in lines[: call.line])
    return lines[call.line - 1].strip() if is_there else ""


def _text(stack: tuple[Call, ...], place: Call | None, recorded: int) -> str:
    """The calls of a stack up to the function of a place, a line each, and the source of the innermost; without a place, all calls."""
    functions = [(call.file, call.function) for call in stack]
    of_place = None if place is None else (place.file, place.function)
    last = len(stack)
    if of_place is not None:
        last = last - functions[::-1].index(of_place) if of_place in functions else _own(stack)
    texts = [f"{call.file} {call.function}" for call in stack[:last]]
    leaf = stack[0] if stack else Call("", 0, "")
    source = _source_of(leaf, recorded) if is_own(leaf.file) else ""
    texts += [f"source: {source}"] if source else []
    return "\n".join(texts)


def _own(stack: tuple[Call, ...]) -> int:
    """The number of calls up to the innermost of the program."""
    return next((place + 1 for place, call in enumerate(stack) if is_own(call.file)), len(stack))


def cause_of(rank: Rank, finding: Finding, chosen: Flags, where: Where | None) -> Cause | None:
    """The cause of a verdict, if the table has it.

    Args:
        rank: the rank.
        finding: the verdict.
        chosen: a mask of its steady steps.
        where: the lines of its time, if they are known.
    """
    for cause in CAUSES:
        if finding.verdict not in cause.verdicts:
            continue
        if cause.test is not None:
            holds = cause.test(rank, chosen)
        else:
            holds = where.part(cause) >= cause.least if where is not None else is_of_operator(cause, finding)
        if holds:
            return cause
    return None


def is_of_operator(cause: Cause, finding: Finding) -> bool:
    """Whether a finding names an operator of a cause."""
    return bool(cause.operators and finding.name) and re.match(cause.operators, finding.name) is not None


class Where:
    """Lines of the time of a verdict."""

    def __init__(
        self, lines: Lines, rows: Flags, found: list[LinePlace], seconds: Floats, *, is_of_loader: bool
    ) -> None:
        self.places = found
        keys = np.stack((lines.stack[rows], lines.operator[rows]))
        distinct, of_rows = np.unique(keys, axis=1, return_inverse=True)
        self._weights = np.bincount(of_rows.ravel(), seconds[rows], distinct.shape[1])
        self.holder = _holder(lines, distinct[0], self._weights)
        """The line of the thread that has the interpreter's lock, if half of the time waits for it; else empty."""
        recorded = int(lines.time[rows].min())
        place = None if is_of_loader else found[0].call  # what is called by a loader is in a stack with its calls
        texts = {stack: _text(lines.stacks[stack], place, recorded) for stack in set(distinct[0].tolist())}
        self._entries = [
            (texts[stack], lines.names[operator] if operator >= 0 else "") for stack, operator in distinct.T.tolist()
        ]

    def part(self, cause: Cause) -> float:
        """The part of the time in calls or operators of a cause."""
        calls, operators = (re.compile(text, re.MULTILINE) if text else None for text in (cause.calls, cause.operators))
        matches = [
            (calls is not None and bool(calls.search(text)))
            or (operators is not None and bool(operators.search(operator)))
            for text, operator in self._entries
        ]
        return float(self._weights[matches].sum() / self._weights.sum())


def _holder(lines: Lines, stacks: Integers, weights: Floats | Integers) -> str:
    holders: dict[Call, float] = defaultdict(float)
    for at, weight in zip(stacks.tolist(), weights.tolist(), strict=True):
        leaf = next(iter(lines.stacks[at]), None)
        if leaf is not None and leaf.file.startswith(WAITS_FOR_LOCK):
            holders[leaf] += weight
    if not holders or sum(holders.values()) < _MOSTLY * float(weights.sum()):
        return ""
    call = max(holders, key=lambda each: holders[each])
    return text_of_call(call._replace(file=call.file.removeprefix(WAITS_FOR_LOCK).lstrip()), lines.folder)


_MOSTLY = 0.5


# ---- findings with lines ----


def with_lines(rank: Rank, finding: Finding, chosen: Flags) -> Finding:
    """A finding with the lines that its time is in and with its cause, as far as they are known.

    Args:
        rank: the rank.
        finding: the finding.
        chosen: a mask of the steps that it is about.
    """
    where = next(_wheres(rank, finding, chosen), None)
    cause = cause_of(rank, finding, chosen, where)
    evidence, statement = list(finding.evidence), finding.statement
    if rank.gap_is_rest or rank.gap_has_operators:
        statement = statement.replace("no operator runs", _gap_in_words(rank, finding.share, chosen))
    if where is not None:
        first, *others = where.places
        line = where.holder or first.text
        finding = finding._replace(line=line)
        evidence[1:1] = _evidence(finding.share, first, others)
        if where.holder:
            evidence.append(f"the thread that has the lock is in {line}")
            if finding.verdict == "gil":
                finding = finding._replace(next_action=f"{_LET_GO}: {line}")
        if first.samples and not finding.is_note and busy_share(rank, chosen) > RULES.most_runnable:
            evidence.append(_BIASED)
        of_line = f"{first.share * finding.share:.0%}"
        part = "" if where.holder or of_line == f"{finding.share:.0%}" else f" ({of_line})"
        statement += f", in {line}{part}" if where.holder or finding.verdict not in _ELSEWHERE else ""
    if cause is not None:
        finding = finding._replace(next_action=cause.advice, check=cause.check, cause=cause.name)
        statement += f": {cause.sentence}"
    elif where is None and finding.verdict == "python-gap":
        statement += ", cause unknown"
    return finding._replace(statement=statement, evidence=tuple(evidence))


def _gap_in_words(rank: Rank, share: float, chosen: Flags) -> str:
    """What a share of step time of ``python-gap`` is, beside the unattributed time of the table of phases."""
    if not rank.gap_is_rest:
        return "is Python outside of operators, or short operators in no phase"
    rest = f"{float(rank.unattributed[chosen].sum() / rank.seconds[chosen].sum()):.0%}"
    return "is in no phase" if rest == f"{share:.0%}" else f"is in no phase and no operator ({rest} is in no phase)"


_BIASED = "beside a busy machine samples lean towards waits: shares of lines that wait are too large"
_ELSEWHERE = frozenset(("gil",))
"""Verdicts whose line suffers from it, unless it is that of the thread that has the lock."""


def _evidence(share: float, first: LinePlace, others: list[LinePlace]) -> Iterator[str]:
    caller = f", called from {first.caller}" if first.caller else ""
    error = f" (95 % interval {span(first.low * share, first.high * share)}, {first.samples} samples)"
    yield f"{first.share * share:.0%} of step time in {first.text}{caller}{error if first.samples else ''}"
    listed = [f"{place.text} {place.share * share:.0%}" for place in others if place.share * share >= _LEAST_LISTED]
    if listed:
        yield "innermost lines: " + ", ".join(listed)


_LEAST_LISTED = 0.005
"""Least part of step time of a listed line: smaller ones are 0 %."""


def _wheres(rank: Rank, finding: Finding, chosen: Flags) -> Iterator[Where]:
    """The lines of a finding, from the first source that has enough of them."""
    for lines in rank.lines:
        rows = rows_of(rank, lines, finding, chosen)
        seconds = lines.seconds
        if finding.verdict == "spikes":
            seconds = _excess(rank, lines, chosen)
            rows &= seconds > 0
        found = places(lines, rows, seconds, is_of_models=finding.verdict == "evaluation-bound")
        if found:
            yield Where(lines, rows, found, seconds, is_of_loader=finding.verdict == "input-bound")


_PHASE_OF = {verdict: PLACE_OF[phase] for phase, verdict in BY_PHASE.items()}
_WAITS = [PLACE_OF[phase] for phase in WAITING]
_DATA, _GC = PLACE_OF["data"], PLACE_OF["gc"]
_OF_OPERATORS = [PLACE_OF[phase] for phase in (*COMPUTING, "optimizer")]
_ALLOCATES = re.compile(r"aten::(empty|zeros|ones|full|fill_|zero_|clone|copy_|rand|new_|cat|stack|_to_copy)")
_COMPUTES = re.compile(r"(^|[/\\])torch[/\\](nn[/\\](functional|modules[/\\])|functional|_tensor|autograd[/\\])")
_ENGINE = r"autograd[/\\]graph\.py"
"""Calls the autograd engine, which is not Python: what it takes between operators is the model's."""
_IS_NO_GAP = re.compile(rf"(^|[/\\])torch[/\\]{_ENGINE}")
_COMMUNICATES = re.compile(rf"(^|[/\\])torch[/\\](distributed[/\\]|{_ENGINE})")
_LOADS = re.compile(r"(^|[/\\])torch[/\\]utils[/\\]data[/\\]")


def rows_of(rank: Rank, lines: Lines, finding: Finding, chosen: Flags) -> Flags:
    """A mask of the lines that the time of a finding is in; ``chosen`` is one of steps."""
    verdict = finding.verdict
    in_steps = _in_steps(lines, chosen)
    if verdict in _PHASE_OF:
        in_phase = in_steps & _in_phase(rank, lines, _PHASE_OF[verdict])
        kind = verdict.removesuffix("-bound")
        in_pause = rows_in([(pause.start, pause.duration) for pause in rank.pauses if pause.kind == kind], lines.time)
        either: Flags = in_phase | in_pause
        return either
    if verdict in ("python-gap", "gil"):
        gap = in_steps & in_gap(rank, lines)
        waits = gap & _waits_for_lock(lines)
        return waits if verdict == "gil" and lines.suffices(waits) else gap
    if verdict == "host-bound":
        return in_steps & ~np.isin(lines.phase, _WAITS)
    if verdict == "spikes":
        return in_steps
    if verdict in ("operator-bound", "allocation-churn"):
        of_name = finding.name
        is_meant = [name == of_name if of_name else bool(_ALLOCATES.match(name)) for name in lines.names]
        return in_steps & (lines.operator >= 0) & np.array(is_meant, np.bool_)[lines.operator]
    return np.zeros(len(lines), np.bool_)


def _in_phase(rank: Rank, lines: Lines, phase: int) -> Flags:
    """A mask of the lines in a phase, as ``Rank.seconds_of`` has it."""
    found: Flags = lines.phase == phase
    if rank.collected and phase in (_DATA, _GC):
        collected = (lines.phase == _GC) & lines.within(_LOADS)
        found = found | collected if phase == _DATA else found & ~collected
    return found


def _waits_for_lock(lines: Lines) -> Flags:
    """A mask of the lines in which another thread has the interpreter's lock."""
    of_stacks = np.zeros(len(lines.stacks), np.bool_)
    for at in distinct_values(lines.stack).tolist():
        of_stacks[at] = any(call.file.startswith(WAITS_FOR_LOCK) for call in lines.stacks[at][:1])
    found: Flags = of_stacks[lines.stack]
    return found


def in_gap(rank: Rank, lines: Lines) -> Flags:
    """A mask of the lines in no operator and in no phase that has none, and in short ones; where operators are not known, in no phase."""
    leaves = [stack[0].file if stack else "" for stack in lines.stacks]
    pattern = _COMMUNICATES if rank.communicates else _IS_NO_GAP
    is_other = np.array([bool(pattern.search(file)) for file in leaves], np.bool_)
    is_gap: Flags
    if lines.has_operators:
        is_gap = (lines.operator == -1) & ((lines.phase == -1) | np.isin(lines.phase, _OF_OPERATORS))
        is_gap |= lines.in_short_operators & rank.gap_has_operators
    else:
        is_gap = lines.phase == -1
        is_other |= np.array([bool(_COMPUTES.search(file)) for file in leaves], np.bool_)
    is_gap &= ~is_other[lines.stack]
    return is_gap


def with_lines_read(rank: Rank) -> Rank:
    """Returns the rank with the times of its steps that follow from its lines.

    Gaps are those of Python: where operators are not known, a part of the time in no phase; else the time without operators, with short
    ones in no phase. Collections of garbage while batches are made belong to these. A part of the optimizer's time is what it needs.
    """
    lines = rank.lines[0] if rank.lines else None
    if lines is None or not lines.is_sampled:
        return rank
    rank.collected, rank.needed = _collected(rank, lines), _needed(lines)
    rest = (lines.step >= 0) & (lines.phase == -1)
    rank.rest_has_lines = lines.suffices(rest)
    is_rest = not lines.has_operators and bool(np.isnan(rank.gap).all())
    if not is_rest and not lines.has_operators:
        return rank
    of_all = lines.operator == -1 if lines.has_operators else lines.phase == -1
    of_all &= (lines.step >= 0) & ((lines.phase == -1) | np.isin(lines.phase, _OF_OPERATORS))
    if lines.suffices(of_all):
        total, own = (float(lines.seconds[rows].sum()) for rows in (of_all, of_all & in_gap(rank, lines)))
        rank.gap = (rank.unattributed if is_rest else rank.gap) * (own / total)
        rank.gap_is_rest, rank.gap_is_own = is_rest, True
    if rank.rest_has_lines and (of_loops := rest & lines.in_short_operators).any():
        more = rank.unattributed * float(lines.seconds[of_loops].sum() / lines.seconds[rest].sum())
        rank.gap, rank.gap_has_operators = np.minimum(rank.gap + more, rank.seconds), True
    return rank


def _collected(rank: Rank, lines: Lines) -> float:
    """The part of the garbage collector's time in a loader that takes enough time to be worth a note."""
    rows = (lines.step >= 0) & (lines.phase == _GC)
    if not lines.suffices(rows) or rank.phases[:, _DATA].sum() < RULES.note_share * rank.seconds.sum():
        return 0.0
    return float(lines.seconds[rows & lines.within(_LOADS)].sum() / lines.seconds[rows].sum())


def _needed(lines: Lines) -> float:
    """The part of the optimizer's time in the operator that takes most of it: one pass over the parameters, which no optimizer does without."""
    rows = (lines.step >= 0) & (lines.phase == PLACE_OF["optimizer"]) & (lines.operator >= -1)
    if not lines.suffices(rows):
        return 0.0
    times = np.bincount(lines.operator[rows] + 1, lines.seconds[rows])
    return float(times[1:].max(initial=0.0) / times.sum())


def _excess(rank: Rank, lines: Lines, slow: Flags) -> Floats:
    """For each row in slow steps, its time minus the mean time of other training steps in the same stack."""
    others = rank.is_training & ~slow
    is_slow, is_other = (_in_steps(lines, steps) for steps in (slow, others))
    sums = [np.bincount(lines.stack[rows], lines.seconds[rows], len(lines.stacks)) for rows in (is_slow, is_other)]
    usual = sums[1] / max(int(others.sum()), 1) * int(slow.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.nan_to_num(np.maximum(sums[0] - usual, 0) / sums[0])
    excess: Floats = np.where(is_slow, lines.seconds * part[lines.stack], 0.0)
    return excess


def with_late_line(finding: Finding, ranks: list[Rank], late: int, chosen: list[Flags]) -> Finding:
    """The finding on a late rank, with the line in which it spends more time than the others, if that is known.

    Args:
        finding: the finding.
        ranks: the ranks.
        late: index of the late one.
        chosen: for each rank, a mask of its steady steps.
    """
    if not all(rank.lines for rank in ranks):
        return finding
    times = [_line_times(rank, steps) for rank, steps in zip(ranks, chosen, strict=True)]
    lines, others = ranks[late].lines[0], times[:late] + times[late + 1 :]
    parts = np.zeros(len(lines.stacks))
    for stack in distinct_values(lines.stack).tolist():
        call = _innermost(lines.stacks[stack])
        mine, usual = times[late].get(call, 0.0), float(np.median([each.get(call, 0.0) for each in others]))
        parts[stack] = max(mine - usual, 0.0) / mine if mine else 0.0
    rows = _in_steps(lines, chosen[late]) & (lines.phase != PLACE_OF["collective"]) & (parts[lines.stack] > 0)
    seconds = lines.seconds * parts[lines.stack]
    found = places(lines, rows, seconds)
    if not found:
        return finding
    more = float(seconds[rows].sum()) * found[0].share / int(chosen[late].sum())
    caller = f", called from {found[0].caller}" if found[0].caller else ""
    text = f"it spends {time(more)} a step more than the others in {found[0].text}{caller}"
    return finding._replace(
        line=found[0].text,
        statement=f"{finding.statement}, in {found[0].text}",
        evidence=(*finding.evidence, text),
    )


def _line_times(rank: Rank, chosen: Flags) -> dict[Call | None, float]:
    """Seconds per step of each innermost line of the program."""
    lines, found = rank.lines[0], defaultdict[Any, float](float)
    rows = _in_steps(lines, chosen)
    sums = np.bincount(lines.stack[rows], lines.seconds[rows], len(lines.stacks)) / max(int(chosen.sum()), 1)
    for stack in np.flatnonzero(sums).tolist():
        found[_innermost(lines.stacks[stack])] += sums.item(stack)
    return found


def _innermost(stack: tuple[Call, ...]) -> Call | None:
    return next(iter(own_calls(stack)), None)


def _in_steps(lines: Lines, chosen: Flags) -> Flags:
    """A mask of the lines in chosen steps."""
    found: Flags = np.append(chosen, False)[lines.step]
    return found
