"""Renders conversations with the library `renderers`, for model families whose own template isn't enough."""
