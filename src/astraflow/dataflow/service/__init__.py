"""The HTTP service around the core: routes, waiting callers, liveness, views."""
