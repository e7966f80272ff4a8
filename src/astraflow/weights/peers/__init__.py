"""Rollout services that pass versions on to each other."""
