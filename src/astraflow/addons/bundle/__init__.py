"""`astraflow bundle`: packs everything that a machine without a network needs to run a recipe."""
