"""`astraflow model`: builds the models that specs describe, trained for a moment or from GGUF files."""
