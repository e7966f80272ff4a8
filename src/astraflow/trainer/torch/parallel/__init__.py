"""Torch over several devices: sharding, tensor and context parallelism."""
