"""One run from start to end: checks, services, offline training, evaluation, export, one-episode trials."""
