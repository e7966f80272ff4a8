"""The recipe: its config classes, values derived from it, the run folder, and what a resume may change."""
