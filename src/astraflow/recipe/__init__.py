"""The recipe: its config classes, defaults derived from it, the run folder and what `resume` may change."""
