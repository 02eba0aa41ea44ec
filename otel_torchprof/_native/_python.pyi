# The extension module of the sources that need Python's API: native/src/sources/python/*.cc.

import types
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

def attach(address: int) -> None: ...

# Owns native memory: frees it when the last reference to the result goes. memory, free: addresses; kept: lives until then.
def owner(memory: int, free: int, kept: object, /) -> object: ...

# What follows is there only after attach().

# The class of objects with these attributes that Python's collector neither counts nor visits; names: its own full name, then theirs.
def untracked(names: tuple[str, ...], /) -> type[Any]: ...

class Label:
    name: str
    args: str | None
    run_callbacks_on_exit: bool
    def __init__(self, name: str, args: str | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None: ...
    def finish(self, exc_type: type[BaseException] | None, /) -> None: ...
    def is_open(self) -> bool: ...
    def suspend(self) -> bool: ...
    def resume(self) -> bool: ...

# graph(label, begins): told of the labels that a thread enters and leaves while a function runs on it in traced(), after they have begun
# and before they end; of None around the call.
def show_labels(graph: Callable[[Label | None, bool], object], /) -> None: ...
def traced(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any: ...

# Has calls of a function of Python's followed, whose first argument is a module: each is an event, or a phase, of the sessions that request
# that. One function at a time; None: none. Whether it is followed: not every interpreter lets it be.
def follow_calls(function: types.FunctionType | None, /) -> bool: ...

# names: by a module's id, the table of names in which it stands. find(module, table): asked for the table of a module that
# is in none (None), or not in the one of the module that calls it. A table has, by a module's id, its name, or that and the
# id of the wrapper that is called in its place.
def follow_modules(names: dict[int, Any], find: Callable[[Any, Any], dict[int, Any]], /) -> None: ...
def leave_modules() -> None: ...

# Phases of a training loop (see otel_torchprof._columns.phases.Part): what wraps a function begins and ends them; owner: the object that
# it is of, or None; exc_type: of the exception that left it. names: of their events, by part. graph_task(): number of the backward pass
# that the calling thread runs, -1 for none. running(): ids of the optimizers in whose steps that is, innermost first.
# found(module): called with each root module that was none before.
def phase_begin(part: int, owner: object, /) -> None: ...
def phase_end(part: int, owner: object, exc_type: type[BaseException] | None, /) -> None: ...
def follow_phases(
    names: tuple[str, ...],
    is_grad_enabled: Callable[[], bool],
    graph_task: Callable[[], int],
    running: Callable[[], list[int]],
    found: Callable[[Any], object],
    /,
) -> None: ...

# Calls function, as the phase that is the first of parts, where there is one.
def in_phase(
    parts: list[int], owner: object, function: Callable[..., Any], /, *arguments: Any, **keywords: Any
) -> Any: ...

# Calls of transformers' generate; prefills: calls of the model up to its first token. generation(): of the innermost call of the model on the
# calling thread the id of its event (0: it is not recorded), ns since it began, ns from its begin until the first token was there (-1: it was not,
# or nobody could tell), and how many such calls it is in; None where nobody recorded phases when it began.
def generate_begin(model: object, prefills: int, /) -> None: ...
def generate_end(model: object, exc_type: type[BaseException] | None, /) -> None: ...
def generation(model: object, /) -> tuple[int, int, int, int] | None: ...

# Torch's global hooks of optimizers, and the hook of gc.callbacks.
def optimizer_begin(optimizer: object, args: object, kwargs: object, /) -> None: ...
def optimizer_end(optimizer: object, args: object, kwargs: object, /) -> None: ...
def phase_collection(phase: str, info: dict[str, int], /) -> None: ...

# What the system says of a thread: its number there, ns that it was ready to run and did not (-1: unknown), minor and major page faults, voluntary and
# involuntary context switches, ns that it ran, since it began; and ns that all threads of the process ran, the others only while it did not. usage_at(event): at the begin of that phase; None where it was not asked for, as of
# the latest 16,384 of threads that train. usage_now(): of the calling thread, now: 0.5 us, ten times as much where it was switched out
# since it was asked about last.
def usage_at(event: int, /) -> tuple[int, int, int, int, int, int, int, int] | None: ...
def usage_now() -> tuple[int, int, int, int, int, int, int, int] | None: ...

# Foresees the steps of a loop for the session with that bit: in those that are not selected it records nothing outside of contexts.
# thread: threading.get_ident() of the loop. phases: (part, address of its object) of those of a step, the first and the last one where they stand.
# relevant: parts that say something of a loop, as bits; one that is not among the phases ends the foresight. foreseen(consumer): the events of the
# phases with which the first and the latest step since then began, 0 if none has, and how many have; None where nothing is foreseen (any more).
# select_foreseen(consumer, count, selected): a byte for each step from the one of that count on (1: the first), 0 where it is not selected;
# all others are selected.
def foresee(consumer: int, thread: int, phases: tuple[tuple[int, int], ...], relevant: int, /) -> None: ...
def foreseen(consumer: int, /) -> tuple[int, int, int] | None: ...
def select_foreseen(consumer: int, count: int, selected: bytes, /) -> None: ...
def forget_foresight(consumer: int, /) -> None: ...

# False; dynamo is told to read it as True.
def in_graph() -> bool: ...

# set_callback: dynamo's set_eval_frame; the resolver below and the like are called while the thread has none.
def follow_compiler(set_callback: Callable[[Any], Any], /) -> None: ...

# resolver: number of the context of the calling thread. by_identity: the resolver knows only what is in context variables.
# Returns whether the context is known to be the same without asking.
def set_context_resolver(resolver: Callable[[], int] | None, by_identity: bool = True, /) -> bool: ...

# Calls of the resolver, and of a finder of modules, that raised.
def errors() -> int: ...

# Pauses of the garbage collector as events of the sessions with those bits: told by the first, which is for gc.callbacks. The last
# says whether that is needed still: for other sessions, or for the end of a collection that goes on.
def on_collection(phase: str, info: dict[str, int], /) -> None: ...
def follow_collections(consumer: int, /) -> None: ...
def leave_collections(consumers: int, /) -> bool: ...

# Calls of Python and C functions, as events of the session with that bit, on all threads. prefixes: what paths of files lose;
# own: directory whose functions are left out, with what they call, unless they are in one of the files `passing`; module_call:
# code that is named after the module that is called; step: code that each step of an optimizer calls; quiet:
# functions, with their modules, whose calls are left out; notes: gets the objects
# that are called for the first time; return_generator: the opcode with which generators begin, -1 for none; decide: whether calls of a
# code are wanted, None for all; max_depth: 0 for any; follows: whether the session follows contexts. Returns how many threads
# were passed over since they have a profile function. There where can_trace_frames.
can_trace_frames: int
# Whether the interpreter tells of them by sys.monitoring (since 3.12), or by a profile function.
monitors_calls: int

def start_frames(
    consumer: int,
    prefixes: tuple[str, ...],
    own: str,
    passing: tuple[str, ...],
    module_call: types.CodeType | None,
    step: types.CodeType | None,
    quiet: tuple[str, ...],
    notes: Any,
    return_generator: int,
    decide: Callable[[types.CodeType, str | None], bool] | None,
    max_depth: int,
    functions: bool,
    modules_only: bool,
    follows: bool,
    /,
) -> int: ...

# The stacks of threads that were there when the session with that bit came, and have had no event since: the thread's ident, its
# system's id (0: not known), and name and identity of each call that the session wants, from the outermost on.
def waiting_stacks(consumer: int, /) -> list[tuple[int, int, list[tuple[int, int]]]]: ...

# The calling thread begins no calls any more, traced or not yet, and does again after as many of the second.
def pause_frames() -> None: ...
def resume_frames() -> None: ...

# No longer for the sessions with those bits. Returns how many threads were taken by others meanwhile.
def stop_frames(consumers: int, /) -> int: ...
def trace_new_thread(frame: types.FrameType, event: str, argument: object, /) -> None: ...

class Frames: ...

# Stacks of Python's threads, read without Python's lock while they run. find_stacks(frame, marked): has to be called first; None, or why they cannot be
# read. frame: of the caller, whose name and qualified name differ; marked: its code with a first line that is no other number in it. read_stack(os_tid):
# file, line and function of each call of a thread, the innermost first. stacks_writer(): address of the function for otp_hang_watch_start.
def find_stacks(frame: types.FrameType, marked: types.CodeType, /) -> str | None: ...
def read_stack(os_tid: int, /) -> list[tuple[str, int, str]]: ...
def stacks_writer() -> int: ...
