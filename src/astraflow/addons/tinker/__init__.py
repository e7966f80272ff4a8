"""The verbs of the Tinker API, for training loops of your own."""
