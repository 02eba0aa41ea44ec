"""What the columns say: parents, self time, stacks, modules, memory, devices."""
