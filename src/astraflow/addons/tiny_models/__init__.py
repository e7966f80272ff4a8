"""`astraflow model`: builds tiny models from a spec, with a supervised warm start."""
