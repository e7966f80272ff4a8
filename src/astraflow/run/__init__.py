"""Runs a recipe from start to end: checks, services, offline training, evaluation, export, and trials."""
