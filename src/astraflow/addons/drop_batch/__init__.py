"""`astraflow drop-batch`: drops a batch at which a trainer keeps failing."""
