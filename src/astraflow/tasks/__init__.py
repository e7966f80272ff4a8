"""Tasks: where they come from (sources), and how answers are scored (rewards, environments)."""
