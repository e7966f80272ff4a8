"""The watchdog: rules that say what is wrong with a run, why, and what to do."""
