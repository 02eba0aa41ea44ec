"""Public queries about ranks: the resource of this rank, and the span of any rank's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import Resource, ResourceDetector

from otel_torchprof._ranks.ranks import Ranks

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

__all__ = ["RankResourceDetector", "rank_resource", "step_context"]


def rank_resource() -> Resource:
    """Returns the attributes that identify this rank, such as ``torch.distributed.rank``, as a Resource.

    The instrumentation adds them to its own spans. For metrics, logs and other spans, whose resource the program sets:
    ``Resource.create({...}).merge(otel_torchprof.rank_resource())``. Before ``init_process_group`` it has the
    attributes from the launcher (torchrun, SLURM, MPI); after it, also a run id if the launcher gave none. Empty in a
    process that is not a rank. Raises nothing. Thread-safe; costs microseconds, and a round trip to the process group's
    store.

    Examples:
        >>> from opentelemetry.sdk.resources import Resource
        >>> resource = Resource.create({"service.name": "training"}).merge(otp.rank_resource())
        >>> resource.attributes["service.name"]
        'training'
    """
    from .instrumentor import running_ranks

    ranks = running_ranks() or Ranks()
    ranks.look()
    return Resource(ranks.attributes())


def step_context(rank: int, step: int) -> SpanContext | None:
    """Computes the SpanContext of a step on any rank of this run, for a link, without communication.

    The span may be unsampled, or may never exist: this is not known here. Thread-safe; costs microseconds.

    Args:
        rank: global rank.
        step: number of the step.

    Returns:
        None while torch is not instrumented, with one rank only, or before the ranks have agreed on their run, which
            happens when the process group is created.

    Examples:
        >>> otp.step_context(rank=3, step=100) is None
        True
    """
    from .instrumentor import running_ranks

    ranks = running_ranks()
    return None if ranks is None else ranks.step_context(rank, step)


class RankResourceDetector(ResourceDetector):
    """:func:`rank_resource` for ``OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=torch_ranks``, without a change of code."""

    def detect(self) -> Resource:
        """Returns the attributes of this rank."""
        return rank_resource()
