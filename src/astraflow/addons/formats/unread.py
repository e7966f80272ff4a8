"""Finds calls in replies that the parser of a workflow didn't read."""

from collections.abc import Collection, Sequence

from astraflow.workflows.calls import CALL_PARSERS, ToolCall, looks_like_call, offered_calls

__all__ = ["is_unread"]


def is_unread(calls: Sequence[ToolCall], reply: str, offered: Collection[str]) -> bool:
    """Whether a reply looks like a call that wasn't read: it has no calls, or only broken ones, which another
    format reads."""
    if not calls:
        return looks_like_call(reply, offered)
    if not all(call.problem for call in calls):
        return False
    others = (offered_calls(parser, reply, offered) for parser in CALL_PARSERS.values())
    return any(not call.problem for calls in others for call in calls)
