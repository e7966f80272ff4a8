"""Supervised fine-tuning on conversations: the source `messages` and the workflow `supervised`."""
