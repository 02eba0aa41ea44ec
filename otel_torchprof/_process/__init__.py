"""Process-wide services for all other folders: forks, late imports, deadlines, cleanup, rate-limited warnings."""
