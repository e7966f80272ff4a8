"""The trainer: its loop, batches as columns, packing, steps, checkpoints."""
