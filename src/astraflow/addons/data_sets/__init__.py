"""Known data sets: prepared once, then read from a folder."""
