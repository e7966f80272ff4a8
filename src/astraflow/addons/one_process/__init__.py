"""Runs in one process, without sockets: a whole run, steps to read and debug, and `astraflow run --only`."""
