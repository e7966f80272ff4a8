"""`astraflow conformance`: checks that a service keeps the rules of the protocol."""
