"""Experiments: sweeps over values and seeds, comparisons of runs, and runs as data frames for notebooks."""
