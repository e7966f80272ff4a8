"""Search indexes: built once, then searched by workflows."""
