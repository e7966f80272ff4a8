"""Judges: the reward `judge`, and the workflow `compare_answers`, whose judge or function ranks answers."""
