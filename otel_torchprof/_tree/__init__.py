"""What the columns say: parents, self time, sums, stacks, modules, memory, devices."""
