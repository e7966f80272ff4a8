"""Short questions for a small language model: the source and reward `words`, and general knowledge."""
