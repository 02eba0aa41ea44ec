"""What is recorded, one file each: operators, labels, frames, devices, energy, collectives, compilations, steps."""
