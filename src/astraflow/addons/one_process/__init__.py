"""Runs in one process, without sockets: a whole run for other add-ons, and steps to read and debug."""
