"""Generated tokens by the thousand: the slowest as they were, and all others as sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .absorbing import durations_of, tokens
from .aggregating import NOT_SHORT, Sizes, composed, first_alike, siblings_of, with_all_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._tree.span_table import SpanTable

    from .aggregating import Siblings

Array = npt.NDArray[Any]


def tokens_aggregated(
    table: SpanTable, root: int, _short: float, fits: Callable[[int, int], bool]
) -> tuple[SpanTable, Array]:
    """The table with all tokens of a call of ``generate`` aggregated but the slowest, as many of which stay as fit.

    Of what stands between two tokens that stay, tokens and all that is beside them, everything of one name becomes one span, and so
    does what is below that, level by level. ``fits`` is asked for numbers of spans and bytes, and how many stay is doubled as long as
    it says yes; where nothing fits, none does. ``root``: as for :func:`~.aggregating.aggregated`, whose rule holds for what is never aggregated,
    and so does what is returned.
    """
    found = np.flatnonzero(tokens(table))
    if len(found) < 2:  # noqa: PLR2004 - one stands for itself
        return table, np.arange(len(table))
    siblings, sizes = siblings_of(table, root), Sizes(table)
    may_go = siblings.length[found] != NOT_SHORT
    by_length = found[may_go][np.argsort(-durations_of(table)[found[may_go]], kind="stable")]
    into = best = _groups(siblings, found, found[~may_go])
    whole = 1
    while fits(*sizes.of(into)) and whole <= len(by_length):
        best = into
        into = _groups(siblings, found, np.concatenate((found[~may_go], by_length[:whole])))
        whole *= 2
    return composed(table, siblings.tree, best), best


def _groups(siblings: Siblings, found: Array, whole: Array) -> npt.NDArray[np.int64]:
    """For each row the first of those that it becomes one with. ``found``: the tokens, and those that stay ``whole``."""
    tree, order = siblings.tree, siblings.tree.order
    stays = np.zeros(len(order), dtype=np.bool_)
    stays[whole] = True
    family = tree.siblings[order]
    begins = stays[order]
    begins[1:] |= family[1:] != family[:-1]
    run = np.cumsum(begins)
    may_go = np.isin(family, tree.siblings[found]) & ~stays[order] & (siblings.length[order] != NOT_SHORT)
    nodes = order[may_go]
    into = np.arange(len(order))
    into[nodes] = first_alike(nodes, run[may_go] * (siblings.label.max(initial=0) + 1) + siblings.label[nodes])
    return with_all_below(siblings, into)
