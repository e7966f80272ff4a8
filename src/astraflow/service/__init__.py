"""How a service listens, is called, limits its callers, and ends."""
