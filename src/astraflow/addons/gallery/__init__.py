"""`astraflow recipes` and `astraflow init`: copies of the recipes and examples that come with AstraFlow."""
