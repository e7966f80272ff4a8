"""`astraflow drop-batch`: drops a batch on which a trainer keeps failing."""
