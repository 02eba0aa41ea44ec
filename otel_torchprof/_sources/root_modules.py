"""Root modules: those that a program calls itself, found once, and then reported by hooks of their own."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from otel_torchprof._native import python_sources
from otel_torchprof._process.threads import RLock, get_ident

from .compiled_code import before_graphs, hide_hooks, leave_out_of_graphs, leave_uncompiled
from .frame_modules import modules_of
from .torch_hooks import enclosing_modules, without_warning

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("otel_torchprof")

MOST_ROOTS = 256
"""That get hooks: a program that calls its layers one by one would pay for each."""

_begin, _end = python_sources.root_hooks(contextlib.nullcontext())


class RootModules:
    """The modules that the program calls at top level, with hooks that make their calls phases.

    Torch's hooks for all modules cost 1.2 us per module of the model, and code that torch compiles while they are there is
    compiled again without them. So the search has one only from one root's end to the next one's begin: that the first module
    begins takes it out, until the call of that has ended; one that begins in another thread meanwhile is found at a later call.
    It ends for good before anything is compiled.

    For any number of users in a process; any thread.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._lock = RLock()  # a signal handler may shut down in the middle
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._searches = self._has_found = False
        self._key: int | None = None
        """Under which torch has the hook of the search; as torch numbers hooks, from 0."""
        self._cleanup_warning: Callable[[], None] | None = None

    @property
    def has_found(self) -> bool:
        """Whether any root was found since there are users, also one that was freed since."""
        return self._has_found

    @property
    def searches(self) -> bool:
        """Whether it looks for more of them."""
        return self._searches

    def install(self, user: object) -> None:
        """Begins to search. Torch must be imported."""
        with self._lock:
            self._users.add(user)
            self.search()

    def search(self) -> None:
        """Searches, where somebody records phases and nothing has been compiled, which would then be compiled again."""
        with self._lock:
            if self._users and not _has_compiled():
                self._searches = True
                self._key = _new_key() if self._key is None else self._key
                self._cleanup_warning = self._cleanup_warning or without_warning()
                python_sources.after_roots(self._resume)
                self._resume()

    def look_in_frames(self, threads: frozenset[int]) -> None:
        """Gives hooks to the modules that the functions of a loop have, outside of any module's call: where a search cannot be.

        One of these threads does it itself, once, when it begins its next phase: some us per function on its stack. A module that is
        taken for a root without need costs the hooks of its calls.

        Args:
            threads: ``threading.get_ident()`` of those of loops.
        """
        python_sources.call_once(functools.partial(self._look_in_frames, threads))

    def _look_in_frames(self, threads: frozenset[int]) -> None:
        if get_ident() not in threads:
            self.look_in_frames(threads)
            return
        with self._lock:
            for module in modules_of(sys._getframe()) if self._users else ():  # noqa: SLF001 - there is no other way
                self.know(module)

    def know(self, module: Any) -> None:
        """Gives hooks to a module that the program is about to call, also where nothing is searched. A microsecond where it has them."""
        with self._lock:
            is_new = self._users and len(self._roots) < MOST_ROOTS and id(module) not in self._roots
            if is_new and _attach(module) is not None:
                self._remember(module)

    def _remember(self, module: Any) -> None:
        self._has_found = True
        self._roots[id(module)] = weakref.ref(module, functools.partial(self._forget, id(module)))

    def end_search(self) -> None:
        """The roots that are known are all there are, until the next :meth:`search`."""
        with self._lock:
            self._searches = False
            python_sources.after_roots(None)
            python_sources.call_once(None)
            self._pause()
            if self._cleanup_warning is not None:
                self._cleanup_warning()
                self._cleanup_warning = None

    def remove(self, user: object) -> None:
        """Takes the hooks away from the modules, if nobody else uses this; without effect for no user."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return
            self.end_search()
            while self._roots:
                _, reference = self._roots.popitem()
                _detach(reference())

    def after_fork_in_child(self) -> None:
        """The lock may have been another thread's of the parent, and whoever recorded there does not here."""
        self._lock = RLock()
        for user in list(self._users):
            self.remove(user)

    def _resume(self) -> None:
        """A root has ended: the next module that begins may be another one. Called too often for a lock, or to register."""
        if self._searches and self._key is not None:
            _hooks_for_all()[self._key] = _found
        if not self._searches:  # it has ended meanwhile
            self._pause()

    def _pause(self) -> None:
        if self._key is not None:
            _hooks_for_all().pop(self._key, None)

    def found(self, module: Any, arguments: Any) -> None:
        """A module begins while none is known to run. Inside a backward pass it runs for that, and is no root."""
        if id(module) in self._roots and _begin in module._forward_pre_hooks.values():  # noqa: SLF001 - torch's way to ask is to register
            self._pause()
            return
        if enclosing_modules():
            return
        with self._lock:
            if not self._searches or _is_in_backward():
                self._pause()
                return
            begins = _attach(module)
            if begins is None:
                return  # the next one may take hooks
            self._pause()
            self._remember(module)
            if len(self._roots) >= MOST_ROOTS:
                self.end_search()
        if begins:
            _begin(module, arguments)  # torch has collected the hooks of this call already

    def _forget(self, key: int, _reference: object) -> None:
        self._roots.pop(key, None)


def _attach(module: Any) -> bool | None:
    """Gives it the hooks. False where it has them, as a copy of a root does; None where its class does not take any."""
    try:
        if _begin in module._forward_pre_hooks.values():  # noqa: SLF001 - torch's way to ask is to register
            return False
        of_any = sys.modules["torch.nn.modules.module"].Module  # TorchScript's refuse
        of_any.register_forward_hook(module, _end, always_call=True)
        of_any.register_forward_pre_hook(module, _begin)
    except Exception:
        _logger.debug("calls of %s are no phases: it takes no hooks", type(module).__name__, exc_info=True)
        _detach(module)
        return None
    return True


def _detach(module: Any) -> None:
    """Not by the handles that torch gives: an interrupt may come before they are kept, and copies have none. Each hook goes last."""
    for name, hook in (("_forward_pre_hooks", _begin), ("_forward_hooks", _end)):
        hooks = getattr(module, name, {})
        for key in [key for key, known in hooks.copy().items() if known is hook]:
            getattr(module, "_forward_hooks_always_called", {}).pop(key, None)
            hooks.pop(key, None)


def _hooks_for_all() -> dict[int, Any]:
    """Torch's, before the calls of all modules; another dictionary where torch is not there."""
    found: dict[int, Any] = getattr(sys.modules.get("torch.nn.modules.module"), "_global_forward_pre_hooks", {})
    return found


def _new_key() -> int:
    hooks: Any = sys.modules["torch.utils.hooks"]
    number: int = hooks.RemovableHandle(collections.OrderedDict()).id
    return number


def _found(module: Any, arguments: Any) -> None:
    try:
        shared.found(module, arguments)
    except Exception:  # the program's call continues
        _logger.warning("a root module was not recorded", exc_info=True)
        shared.end_search()


def _is_in_backward() -> bool:
    core: Any = sys.modules["torch._C"]
    return bool(core._current_graph_task_id() != -1)  # noqa: SLF001 - what torch's own checkpointing asks


def _has_compiled() -> bool:
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    return bool(getattr(codes, "seen", ()))


shared = RootModules()
"""Those of the process."""
leave_out_of_graphs(_begin, _end, _found)
leave_uncompiled(__name__)
before_graphs(shared.end_search)
hide_hooks(_begin, _end)
os.register_at_fork(after_in_child=shared.after_fork_in_child)
