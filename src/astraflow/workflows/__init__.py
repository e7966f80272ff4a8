"""Workflows: how policies and a task talk in one episode."""
