"""Losses: functions from per-token columns to a loss, in torch."""
