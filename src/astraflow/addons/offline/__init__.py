"""Offline data: adds groups from an earlier run, or from an expert, to the batches of a trainer."""
