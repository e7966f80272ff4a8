"""Search: the workflow `search`, its indexes, and the rewards for short answers."""
