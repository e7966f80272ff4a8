"""`astraflow model`: builds the models that specs describe, and converts GGUF files."""
