"""Data algorithms, in numpy: which tasks and groups are used, and with which advantages."""
