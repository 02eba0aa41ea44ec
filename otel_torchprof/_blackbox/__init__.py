"""The black box of a process: its file, what writes it, what watches for hangs, and what the boxes of all ranks tell."""
