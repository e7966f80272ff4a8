"""`astraflow recipes` and `astraflow init`: the recipes and examples that come with AstraFlow, copied."""
