"""Checks the texts with which a policy makes a choice."""

__all__ = ["check_differ"]


def check_differ(first: str, second: str) -> None:
    """Checks that two choices differ in more than case, which verdicts ignore. Raises: ValueError."""
    if first.lower() == second.lower():
        raise ValueError(f"{first!r} stands for both choices; give each its own text")
