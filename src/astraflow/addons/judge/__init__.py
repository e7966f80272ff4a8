"""The reward `judge`: the verdict of a frozen policy of the run, or of a model at an endpoint."""
