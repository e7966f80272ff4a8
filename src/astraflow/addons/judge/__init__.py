"""Judges: the reward `judge`, and the workflow `compare_answers`, which ranks answers."""
