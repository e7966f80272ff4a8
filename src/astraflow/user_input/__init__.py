"""Reads what users write (files, YAML, names and their own code), and explains what is wrong with it."""
