"""What runs in a host: its program, which needs only the standard library, and adapters for libraries."""
