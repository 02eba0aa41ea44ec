"""Labels inside ``torch.compile`` and ``torch.jit.script``: both read ``record_function`` as torch's own.

Dynamo and TorchScript know torch's class and cannot look into a C function. Each keeps a place where a class can be named as
another; that place exists once the module that has it is imported, which may be before this package, after it, or never.
So what has to be done waits for that import, and then is done once; a label's own code checks for nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types

_logger = logging.getLogger("otel_torchprof")

Action = Callable[[Any], None]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action when a module has been imported; otherwise imports go on as if it were not there."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._run_once)
        return spec

    def _run_once(self, module: types.ModuleType) -> None:
        # Not when the module is found: who only looks for it (importlib.util.find_spec) does not import it.
        action = self._actions.pop(module.__name__, None)
        if action is not None:
            _run(action, module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, after: Action) -> None:
        self._loader = loader
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        created: types.ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._after(module)


def _run(action: Action, module: types.ModuleType) -> None:
    try:
        action(module)
    except Exception:  # a torch that is built otherwise must still import
        _logger.warning("labels will break the graph of torch.compile or TorchScript here", exc_info=True)


def _for_dynamo(label: type) -> Action:
    def teach(dynamo: Any) -> None:
        def as_torch(name: str, args: str | None = None) -> Any:
            return sys.modules["torch"].autograd.profiler.record_function(name, args)

        dynamo.substitute_in_graph(label, is_embedded_type=True, skip_signature_check=True)(as_torch)

    return teach


def _for_torchscript(label: Any) -> Action:
    def teach(script: Any) -> None:
        label._jit_override_qualname = "__torch__.torch.autograd.profiler.record_function"  # noqa: SLF001 - TorchScript's name
        compile_class = script._recursive_compile_class  # noqa: SLF001 - there is no public place

        def compile_torchs(obj: Any, loc: Any) -> Any:
            if obj is label:
                obj = sys.modules["torch"].autograd.profiler.record_function
            return compile_class(obj, loc)

        script._recursive_compile_class = compile_torchs  # noqa: SLF001 - as above

    return teach


def teach(label: type) -> None:
    """Lets dynamo and TorchScript read ``label`` as torch's ``record_function``: now, or when torch is imported."""
    later = {}
    for name, action in (("torch._dynamo", _for_dynamo(label)), ("torch.jit._script", _for_torchscript(label))):
        module = sys.modules.get(name)
        if module is None:
            later[name] = action
        else:
            _run(action, module)
    if later:
        sys.meta_path.insert(0, _AfterImport(later))
