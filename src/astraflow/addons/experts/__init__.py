"""Mixtures of experts: the engine records the experts it chose, and the trainer uses the same ones."""
