"""The workflow `tool_use`, in which a model calls Python functions."""
