"""What runs in a box, and makes one: scripts that need the standard library alone."""
