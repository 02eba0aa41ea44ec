"""Makes labels and optimizer hooks work inside ``torch.compile``, ``torch.jit.script`` and ``torch.jit.trace``.

None of these can compile a C function. Dynamo and TorchScript have tables of substitutes for objects, and tracing
starts in functions that can be replaced. Everything is set up once, when the module of torch is imported.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._native import python_sources
from otel_torchprof._process import threads
from otel_torchprof._process.after_import import Action, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_PACKAGE = Path(__file__).parent.parent
_READ = ("compiled_code.py", "labels.py", "phase_calls.py", "carrying.py", "device_source.py")
"""Files of this folder with wrappers of the program's functions; dynamo compiles these, since they call the program."""


def _leave_package_out(rules: Any) -> None:
    """Lets dynamo call the package's functions instead of reading them, as it does with torch's profiler."""
    folders = [path for path in _PACKAGE.iterdir() if path.name != Path(__file__).parent.name]
    own = [path for path in Path(__file__).parent.glob("*.py") if path.name not in _READ]
    rules.SKIP_DIRS.extend(f"{path.as_posix()}/" if path.is_dir() else path.as_posix() for path in (*folders, *own))
    rules._recompile_re()  # noqa: SLF001 - its public add() accepts one module at a time


def _leave_generated_out(convert_frame: Any) -> None:
    """Has dynamo skip methods that dataclasses of the package generate, which have no file: it fails at read-only arrays."""
    check = convert_frame.trace_rules.check

    @functools.wraps(check)
    def is_skipped(obj: Any, *arguments: Any, **keywords: Any) -> Any:
        is_generated = getattr(obj, "co_filename", "") == _GENERATED and id(obj) in _generated(len(sys.modules))
        return is_generated or check(obj, *arguments, **keywords)

    convert_frame.trace_rules.check = is_skipped


_GENERATED = "<string>"


@functools.lru_cache(maxsize=1)
def _generated(_modules: int) -> frozenset[int]:
    """Ids of code generated for classes of the package; by id, since equal code may be the program's. The argument is a cache key."""
    own = [module for name, module in list(sys.modules.items()) if name.startswith(f"{_PACKAGE.name}.")]
    classes = [value for module in own for value in vars(module).values() if isinstance(value, type)]
    functions = [value for kind in classes for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return frozenset(id(function.__code__) for function in functions if function.__code__.co_filename == _GENERATED)


when_imported("torch._dynamo.trace_rules", _leave_package_out)
when_imported("torch._dynamo.convert_frame", _leave_generated_out)


def _label_for_dynamo(label: type) -> Action:
    def teach(dynamo: Any) -> None:
        def as_torch(name: str, args: str | None = None) -> Any:
            return sys.modules["torch"].autograd.profiler.record_function(name, args)

        dynamo.substitute_in_graph(label, is_embedded_type=True, skip_signature_check=True)(as_torch)

    return teach


def _made_label_for_dynamo(label: Any) -> Action:
    """Treats a label that was created outside the compiled code as torch treats its own."""

    def teach(builder: Any) -> None:
        if not hasattr(builder, "RecordFunctionVariable"):  # an older torch, where dynamo ignores labels anyway
            return
        wrap = builder.VariableBuilder._wrap  # noqa: SLF001 - treats unknown types as plain objects

        @functools.wraps(wrap)
        def wrap_label(self: Any, value: Any) -> Any:
            if not isinstance(value, label):
                return wrap(self, value)
            torch: Any = sys.modules["torch"]
            return wrap(self, torch.autograd.profiler.record_function(value.name, value.args))

        builder.VariableBuilder._wrap = wrap_label  # noqa: SLF001 - as above

    return teach


def read_as_torchs_profile(profile: type) -> None:
    """Makes dynamo treat ``profile`` as torch's own, which it omits from graphs."""

    def teach(dynamo: Any) -> None:
        def as_torch(*_arguments: Any, **_options: Any) -> Any:
            return sys.modules["torch"].profiler.profile()

        dynamo.substitute_in_graph(profile, is_embedded_type=True, skip_signature_check=True)(as_torch)

    when_imported("torch._dynamo", teach)


def _label_for_torchscript(label: Any) -> Action:
    def teach(script: Any) -> None:
        label._jit_override_qualname = "__torch__.torch.autograd.profiler.record_function"  # noqa: SLF001 - TorchScript's name
        compile_class = script._recursive_compile_class  # noqa: SLF001 - there is no public API

        def compile_torchs(obj: Any, loc: Any) -> Any:
            if obj is label:
                obj = sys.modules["torch"].autograd.profiler.record_function
            return compile_class(obj, loc)

        script._recursive_compile_class = compile_torchs  # noqa: SLF001 - as above

    return teach


def _decorated_for_torchscript(home: dict[str, Any]) -> Action:
    """Makes TorchScript, which reads the source of a decorated function, resolve names in that function's module."""

    def teach(internal: Any) -> None:
        get_closure = internal.get_closure

        def get_closure_of_decorated(fn: Any) -> Any:
            while getattr(fn, "__globals__", None) is home and hasattr(fn, "__wrapped__"):
                fn = fn.__wrapped__
            return get_closure(fn)

        internal.get_closure = get_closure_of_decorated

    return teach


class _TracedGraph(threads.local):
    """Open labels in the graphs that this thread traces, each with the graph value that ends it."""

    def __init__(self) -> None:
        self.labels: list[tuple[Any, Any]] = []
        """Open labels; ``(None, ...)`` marks the begin of a graph."""

    def tell(self, label: Any, begins: bool) -> None:
        """Adds torch's label operators to the graph without running them, since the label is also recorded as any other."""
        if label is None:
            if begins:
                self.labels.append((None, None))
            else:
                while self.labels.pop()[0] is not None:
                    pass
            return
        core: Any = sys.modules["torch._C"]
        state = core._get_tracing_state()  # noqa: SLF001 - as torch's own modules do
        if state is None:  # the tracer runs untraced code
            return
        graph = state.graph()
        if begins:
            texts = [graph.insertConstant(text and _printable(text)) for text in (label.name, label.args)]
            node = graph.insertNode(graph.create("profiler::_record_function_enter_new", texts, 1))
            node.output().setType(_type_of_torchs_label(core))
            self.labels.append((label, node.output()))
            return
        for place in reversed(range(len(self.labels))):
            open_label, opened = self.labels[place]
            if open_label is label:
                del self.labels[place]
                graph.insertNode(graph.create("profiler::_record_function_exit", [opened], 0))
            if open_label is label or open_label is None:
                return


class _TracedMethod:
    """A method of a class of C's whose graphs have labels, called without a function of Python's."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return functools.partial(python_sources.traced, self._trace.__get__(owner, kind))


def _printable(text: str) -> str:
    """Without the halves of characters that are no UTF-8, which a graph does not take."""
    return text.encode("utf-8", "replace").decode()


def _type_of_torchs_label(core: Any) -> Any:
    source = "graph(%label : __torch__.torch.classes.profiler._RecordFunction):\n  return (%label)"
    return next(core.parse_ir(source).inputs()).type()


def _labels_for_traces(_trace: Any) -> None:
    graph = _TracedGraph()
    python_sources.show_labels(graph.tell)
    core: Any = sys.modules["torch._C"]
    for end in ("", "_with_dict"):
        function, method = f"_create_function_from_trace{end}", f"_create_method_from_trace{end}"
        setattr(core, function, functools.partial(python_sources.traced, getattr(core, function)))
        setattr(core.ScriptModule, method, _TracedMethod(vars(core.ScriptModule)[method]))


def teach_label(label: type, home: dict[str, Any]) -> None:
    """Makes torch treat ``label`` as its own ``record_function`` in graphs: now, or when torch is imported.

    ``home``: globals of the module with the wrappers of decorated functions.
    """
    when_imported("torch._dynamo", _label_for_dynamo(label))
    when_imported("torch._dynamo.variables.builder", _made_label_for_dynamo(label))
    when_imported("torch.jit._script", _label_for_torchscript(label))
    when_imported("torch._jit_internal", _decorated_for_torchscript(home))
    when_imported("torch.jit._trace", _labels_for_traces)


def leave_out_of_graphs(*hooks: Callable[..., None]) -> None:
    """Makes dynamo treat these built-in functions as empty, since graphs cannot contain them.

    Once per function in a process.
    """

    def teach(dynamo: Any) -> None:
        for hook in hooks:
            dynamo.substitute_in_graph(hook, skip_signature_check=True)(_do_nothing)

    when_imported("torch._dynamo", teach)


def leave_uncompiled(*names: str) -> None:
    """Makes dynamo skip the functions of these modules, some of which run inside a compiled call.

    Otherwise it would compile them like the program's own, and raise if the program allows only one graph.
    """

    def teach(eval_frame: Any) -> None:
        skip = getattr(eval_frame, "skip_code", None)
        for code in itertools.chain.from_iterable(_codes_of(sys.modules[name]) for name in names):
            if skip is not None:
                skip(code)

    when_imported("torch._dynamo.eval_frame", teach)


def _codes_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yields the code of all functions and methods of a module, and of nested functions."""
    waiting: list[Any] = [
        value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__
    ]
    while waiting:
        definition = waiting.pop()
        if isinstance(definition, types.CodeType):
            yield definition
            waiting += [constant for constant in definition.co_consts if isinstance(constant, types.CodeType)]
        elif isinstance(definition, type):
            waiting += [
                getattr(value, "fget", None) or getattr(value, "__func__", value) for value in vars(definition).values()
            ]
        else:
            waiting += [code] if isinstance(code := getattr(definition, "__code__", None), types.CodeType) else []


def _do_nothing(*_arguments: Any) -> None:
    return None


def _true() -> bool:
    return True


def _teach_in_graph(dynamo: Any) -> None:
    """Makes dynamo treat ``in_graph``, a built-in function that returns False, as one that returns True."""
    dynamo.substitute_in_graph(python_sources.in_graph, skip_signature_check=True)(_true)


def _follow_compiler(eval_frame: Any) -> None:
    """Makes dynamo skip functions that run for the recorder inside a compiled call, OpenTelemetry's included."""
    python_sources.follow_compiler(eval_frame.set_eval_frame)


when_imported("torch._dynamo", _teach_in_graph)
when_imported("torch._dynamo.eval_frame", _follow_compiler)
