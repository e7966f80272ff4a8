"""Chunks and versions on disk."""
