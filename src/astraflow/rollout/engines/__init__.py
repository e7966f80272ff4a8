"""Engines: generate tokens for a rollout service."""
