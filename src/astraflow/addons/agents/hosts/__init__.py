"""Hosts: environments in a Python of their own, in which episodes run."""
