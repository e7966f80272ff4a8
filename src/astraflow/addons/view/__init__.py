"""The live screen, `astraflow status`, and `astraflow view`: an index of runs, with a page and commands."""
