"""The `astraflow` command: thin shells that parse arguments."""
