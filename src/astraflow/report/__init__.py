"""What a person sees of a run: lines, `status`, summaries, metrics, alarms."""
