"""What a person sees of a run: the live screen, `status`, summaries, metrics, alarms."""
