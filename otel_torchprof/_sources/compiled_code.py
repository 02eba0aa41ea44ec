"""Labels and hooks inside ``torch.compile`` and ``torch.jit.script``: what dynamo and TorchScript are told of them.

Neither can look into a C function. Each keeps a place where something can be named as something else; that place exists once
the module that has it is imported. So it is told then, once; a label's own code and the hooks check for nothing.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.after_import import Action, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _label_for_dynamo(label: type) -> Action:
    def teach(dynamo: Any) -> None:
        def as_torch(name: str, args: str | None = None) -> Any:
            return sys.modules["torch"].autograd.profiler.record_function(name, args)

        dynamo.substitute_in_graph(label, is_embedded_type=True, skip_signature_check=True)(as_torch)

    return teach


def _label_for_torchscript(label: Any) -> Action:
    def teach(script: Any) -> None:
        label._jit_override_qualname = "__torch__.torch.autograd.profiler.record_function"  # noqa: SLF001 - TorchScript's name
        compile_class = script._recursive_compile_class  # noqa: SLF001 - there is no public place

        def compile_torchs(obj: Any, loc: Any) -> Any:
            if obj is label:
                obj = sys.modules["torch"].autograd.profiler.record_function
            return compile_class(obj, loc)

        script._recursive_compile_class = compile_torchs  # noqa: SLF001 - as above

    return teach


def _decorated_for_torchscript(home: dict[str, Any]) -> Action:
    """TorchScript reads the source of what a decorator wraps; its names are then to be looked up where that stands."""

    def teach(internal: Any) -> None:
        get_closure = internal.get_closure

        def get_closure_of_decorated(fn: Any) -> Any:
            while getattr(fn, "__globals__", None) is home and hasattr(fn, "__wrapped__"):
                fn = fn.__wrapped__
            return get_closure(fn)

        internal.get_closure = get_closure_of_decorated

    return teach


def teach_label(label: type, home: dict[str, Any]) -> None:
    """Lets dynamo and TorchScript read ``label`` as torch's ``record_function``: now, or when torch is imported.

    ``home``: the globals of the module whose functions wrap what is decorated with it.
    """
    when_imported("torch._dynamo", _label_for_dynamo(label))
    when_imported("torch.jit._script", _label_for_torchscript(label))
    when_imported("torch._jit_internal", _decorated_for_torchscript(home))


def leave_out_of_graphs(*hooks: Callable[..., None]) -> None:
    """Lets dynamo read these built-in functions as ones that do nothing: a graph has no place for what they do.

    Once per function in a process.
    """

    def teach(dynamo: Any) -> None:
        for hook in hooks:
            dynamo.substitute_in_graph(hook, skip_signature_check=True)(_nothing)

    when_imported("torch._dynamo", teach)


def leave_uncompiled(*names: str) -> None:
    """Lets dynamo leave the functions of these modules alone, of which some run in the middle of a compiled call.

    It would compile them like the program's own, and where the program allows one graph only, raise for what it cannot.
    """

    def teach(eval_frame: Any) -> None:
        skip = getattr(eval_frame, "skip_code", None)
        for code in itertools.chain.from_iterable(_codes_of(sys.modules[name]) for name in names):
            if skip is not None:
                skip(code)

    when_imported("torch._dynamo.eval_frame", teach)


def _codes_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of all functions and methods of a module, and of what they define."""
    waiting: list[Any] = [
        value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__
    ]
    while waiting:
        found = waiting.pop()
        if isinstance(found, types.CodeType):
            yield found
            waiting += [constant for constant in found.co_consts if isinstance(constant, types.CodeType)]
        elif isinstance(found, type):
            waiting += [
                getattr(value, "fget", None) or getattr(value, "__func__", value) for value in vars(found).values()
            ]
        else:
            waiting += [code] if isinstance(code := getattr(found, "__code__", None), types.CodeType) else []


def _nothing(*_arguments: Any) -> None:
    return None
