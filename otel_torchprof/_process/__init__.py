"""What every room needs of the process: forks, late imports, deadlines, cleanup, rate-limited warnings."""
