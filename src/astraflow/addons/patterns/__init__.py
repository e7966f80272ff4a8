"""Workflows from the literature: several turns, checks, debate, routing, planning, selection, sub-agents."""
