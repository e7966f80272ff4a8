"""`astraflow eval`: evaluates a version of a run, a model folder, or an endpoint after training."""
