"""`astraflow model`: tiny models built from a spec, with a supervised warm start."""
