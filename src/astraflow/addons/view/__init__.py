"""The live screen, `astraflow status`, and `astraflow view`: a web page, an index of runs, and commands."""
