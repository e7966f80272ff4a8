"""Scripts that create a box and run in it. They need only the standard library."""
