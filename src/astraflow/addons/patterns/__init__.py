"""Workflows of several policies from the literature: debate, routing, planning, selection, sub-agents."""
