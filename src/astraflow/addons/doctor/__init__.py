"""`astraflow doctor`: checks whether this machine and a recipe are ready for a run."""
