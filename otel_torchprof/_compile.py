"""Labels and hooks inside ``torch.compile`` and ``torch.jit.script``: what dynamo and TorchScript are told of them.

Neither can look into a C function. Each keeps a place where something can be named as something else; that place exists once
the module that has it is imported. So it is told then, once; a label's own code and the hooks check for nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ._after_import import Action, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable


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


def teach_label(label: type) -> None:
    """Lets dynamo and TorchScript read ``label`` as torch's ``record_function``: now, or when torch is imported."""
    when_imported("torch._dynamo", _label_for_dynamo(label))
    when_imported("torch.jit._script", _label_for_torchscript(label))


def leave_out_of_graphs(*hooks: Callable[..., None]) -> None:
    """Lets dynamo read these built-in functions as ones that do nothing: a graph has no place for what they do.

    Once per function in a process.
    """

    def teach(dynamo: Any) -> None:
        for hook in hooks:
            dynamo.substitute_in_graph(hook, skip_signature_check=True)(_nothing)

    when_imported("torch._dynamo", teach)


def _nothing(*_arguments: Any) -> None:
    return None
