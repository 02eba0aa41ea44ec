"""Computes tables from columns: parents, spans and links, steps and phases, self times and sums, inputs, memory, devices."""
