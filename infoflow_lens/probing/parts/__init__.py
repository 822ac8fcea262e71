"""The parts of a probe run, a file each."""
