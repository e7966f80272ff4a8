"""What people write: files, YAML, names and code of their own; explains what is wrong with it."""
