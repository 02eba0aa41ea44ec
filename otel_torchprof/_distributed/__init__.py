"""Distributed runs: the place of each rank, span ids that all ranks derive alike, which ranks export."""
