"""Checks, before a run, that models have room for their answers."""
