"""The live screen, and `astraflow view`: an index of runs, live or not, with a page and commands."""
