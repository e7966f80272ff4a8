"""Tasks of the `reasoning-gym` library, and their scorers."""
