"""Why training is slow, what differs, who hung: rules over steps, verdicts with their evidence, out of tables, files and boxes."""
