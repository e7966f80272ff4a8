"""The delta encoding of versions."""
