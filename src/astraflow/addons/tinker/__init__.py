"""The verbs of the Tinker API, for writing your own training loops."""
