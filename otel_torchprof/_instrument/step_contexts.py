"""What a program may ask of its ranks: the resource of its own one, and the span of any rank's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import Resource, ResourceDetector

from otel_torchprof._distributed.ranks import Ranks

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

__all__ = ["RankResourceDetector", "rank_resource", "step_context"]


def rank_resource() -> Resource:
    """The attributes by which this rank's telemetry is told from that of others: ``torch.distributed.rank`` and the like.

    The instrumentation adds them to its own spans. For metrics, logs and other spans, whose resource is the program's to
    decide: ``Resource.create({...}).merge(otel_torchprof.rank_resource())``. Before ``init_process_group`` it has what the
    launcher says (torchrun, SLURM, MPI), after it also a run id where the launcher gave none; in a process that is no rank it is
    empty. Raises nothing. Any thread; microseconds, and a round trip to the process group's store.
    """
    from .instrumentor import running_ranks

    ranks = running_ranks() or Ranks()
    ranks.look()
    return Resource(ranks.attributes())


def step_context(rank: int, step: int) -> SpanContext | None:
    """The span of a step on any rank of this run, to link to: computed, without asking that rank.

    None where torch is not instrumented, there is one rank only, or the ranks have not agreed on their run yet, which they do
    when the process group is made. Whether that rank's step was sampled, or will happen, nobody knows here. Any thread;
    microseconds.
    """
    from .instrumentor import running_ranks

    ranks = running_ranks()
    return None if ranks is None else ranks.step_context(rank, step)


class RankResourceDetector(ResourceDetector):
    """:func:`rank_resource` for ``OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=torch_ranks``: without a change of code."""

    def detect(self) -> Resource:
        """The attributes of this rank."""
        return rank_resource()
