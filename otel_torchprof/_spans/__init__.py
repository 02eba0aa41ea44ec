"""What events are as spans: traces, ids, links, steps, limits."""
