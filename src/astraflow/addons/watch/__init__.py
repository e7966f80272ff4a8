"""The watchdog's rules: what can be wrong with a run, how it shows, and what to do."""
