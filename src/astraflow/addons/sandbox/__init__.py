"""The sandbox: runs programs that a model wrote, which then reach nothing of the machine."""
