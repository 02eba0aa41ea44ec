"""The table: what the columns say. Parents, spans and links, steps and phases, self times and sums, inputs, memory, devices."""
