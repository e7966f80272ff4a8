"""What a person sees of a run: lines, summaries, metrics, alarms."""
