"""A recording and its sources, one file each: operators, labels, calls, devices, energy, collectives, compilations, steps."""
