"""Sums and averages of operators."""
