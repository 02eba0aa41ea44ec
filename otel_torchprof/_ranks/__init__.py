"""The place of this process in a run: ranks, span ids that all of them derive alike, which of them export."""
