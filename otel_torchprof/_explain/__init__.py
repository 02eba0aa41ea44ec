"""Why training is slow, out of trace files: steps and what they were made of, rules, verdicts with their evidence."""
