"""Versions of weights in object stores such as S3."""
