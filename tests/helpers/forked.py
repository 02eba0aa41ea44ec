"""Children that are forked while a thread of the parent is somewhere in particular."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

LONG = 60.0
"""Seconds after which something that was waited for hangs; no test takes that long."""


class Pause:
    """Lets the first call of a function wait: :attr:`reached` once it does, until :attr:`let_go` is set.

    Args:
        monkeypatch: puts the function back.
        owner: the class or module that has it.
        name: its name there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def paused(*arguments: Any, **keywords: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                assert self.let_go.wait(LONG)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, paused)


def in_child(body: Callable[[], object], seconds: float = LONG) -> str:
    """``repr(body())`` in a forked child, which gets no further; of one that hangs, where its threads are."""
    reader, writer = os.pipe()
    faulthandler.cancel_dump_traceback_later()  # where this is a child: its own would wait for the thread that watches this one
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        said = "nothing: it raised"
        try:
            faulthandler.dump_traceback_later(seconds, exit=True, file=writer)
            said = repr(body())
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            said = f"raised {error!r}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


# Also ends one that hangs in the fork itself: what is registered first runs first, and this is before a test makes anything.
os.register_at_fork(after_in_child=lambda: signal.alarm(round(2 * LONG)))
