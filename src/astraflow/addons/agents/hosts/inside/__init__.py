"""What runs in a host: its program, in the standard library alone, and adapters to what it serves."""
