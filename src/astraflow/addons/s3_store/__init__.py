"""Versions in S3 object storage (extra `store`)."""
