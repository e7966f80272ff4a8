"""`astraflow export`, and the best version of each policy: writes versions as model folders."""
