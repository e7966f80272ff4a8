"""Versions of weights on their way from a trainer to engines: manifest, publisher, receiver."""
