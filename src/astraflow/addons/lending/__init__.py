"""Lends a trainer's devices to rollout services while the trainer waits for its next batch."""
