"""The resource of a forked process, which its parent has made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from otel_torchprof._process import process_changes

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_PID = "process.pid"
_PARENT_PID = "process.parent_pid"
_RUNTIME = "process.runtime.name"
"""Set by detectors together with the process id; programs that set only the id do not set it."""

_pid = os.getpid()
_ancestors: set[int] = set()
_last: tuple[Resource, Resource] | None = None
"""A resource of the parent, and the same of this process."""


def of_this_process(resource: Resource) -> Resource:
    """The resource with the ids of this process, where a detector has found those of a process that it was forked from.

    Ids that the program gave itself stay. The same object as long as it is given the same. Any thread.
    """
    global _last  # noqa: PLW0603 - replaced as a whole
    attributes = resource.attributes
    if not _ancestors or attributes.get(_PID) not in _ancestors or _RUNTIME not in attributes:
        return resource
    last = _last
    if last is None or last[0] is not resource:
        # Imported late: code that creates a resource has imported it.
        from opentelemetry.sdk.resources import Resource

        own = {_PID: os.getpid()} | ({_PARENT_PID: os.getppid()} if _PARENT_PID in attributes else {})
        last = _last = (resource, resource.merge(Resource(own)))
    return last[1]


def _in_child() -> None:
    global _last, _pid
    _ancestors.add(_pid)
    _pid, _last = os.getpid(), None


process_changes.at_fork(process_changes.Order.STATE, in_child=_in_child)
