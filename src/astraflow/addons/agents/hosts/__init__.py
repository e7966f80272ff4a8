"""Hosts: processes with a separate Python, in which environments run episodes."""
