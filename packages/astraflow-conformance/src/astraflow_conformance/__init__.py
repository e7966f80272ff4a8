"""`astraflow conformance`: checks whether a service keeps the rules of the protocol."""
