"""Distillation on the policy's own answers: the workflow `distill`, and losses over several tokens."""
