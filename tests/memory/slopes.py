"""Whether memory grows: the slope of a line through samples, and how sure that is."""

import numpy as np

STUDENTS_T = 2.01
"""97.5 % quantile of Student's t distribution with 48 degrees of freedom: 50 samples, two of them spent on the line. Of more
samples it is hardly less."""


def lower_bound(samples):
    """Lower end of the 95 % confidence interval of the slope of a line through the samples, per sample."""
    at = np.arange(len(samples)) - (len(samples) - 1) / 2
    values = np.asarray(samples, dtype=float)
    slope = (at @ values) / (at @ at)
    residuals = values - values.mean() - slope * at
    deviation = np.sqrt((residuals @ residuals) / (len(samples) - 2) / (at @ at))
    return slope - STUDENTS_T * deviation


def without_jumps(samples, count=3):
    """The samples without so many of their largest steps up or down: the stack of a thread, or a table that doubles, is no slope."""
    steps = np.diff(np.asarray(samples, dtype=float))
    steps[np.argsort(-np.abs(steps), kind="stable")[:count]] = 0
    return np.concatenate(([0.0], np.cumsum(steps)))
