"""Runs a tool in separate processes, so that a call that takes too long can be killed.

    tool_use -> ToolProcesses.call -> process (`service.kept_object`): `ToolServer.call` -> the function

A process runs one call at a time and is then reused. A caller that stops waiting kills the process and
everything that it started, and another process replaces it. All processes end with the service, however the
service ends.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from astraflow.addons.tools.tool import ToolContext, ToolFailedError, shorten, text_of
from astraflow.config import Use, load_attr
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.kept_object import InvalidAnswerError, KeptObject, ObjectLostError
from astraflow.user_input.own_code import ending_forks

__all__ = ["ToolProcesses", "ToolReply", "ToolServer"]

_MAX_CHARS = 1 << 20
"""Maximum number of characters of a result that are sent to the service. The model sees fewer."""


@dataclass(frozen=True, slots=True)
class ToolReply:
    """How a call ended."""

    text: str
    is_error: bool = False
    is_broken: bool = False
    """True if the tool itself doesn't work, so that the episode fails."""
    is_retryable: bool = False


class ToolServer:
    """The object of a process. Example: `ToolServer(Use(use="my_tools:search")).call({"query": "maps"})`."""

    def __init__(self, use: Use) -> None:
        self._use = use

    def call(self, arguments: Mapping[str, object]) -> ToolReply:
        """Calls the function."""
        try:
            with ending_forks():
                value = load_attr(self._use.use, where="tools")(**self._use.args, **arguments)
                return ToolReply(shorten(text_of(value), _MAX_CHARS))
        except RolloutError as err:
            return ToolReply(str(err), is_broken=True, is_retryable=err.is_retryable)
        except ConfigError as err:
            return ToolReply(str(err), is_broken=True)
        except (Exception, SystemExit) as err:  # noqa: BLE001 - the model is told
            return ToolReply(f"{type(err).__name__}: {err}", is_error=True)


class ToolProcesses:
    """Processes for the calls of one tool.

    Example: `await ToolProcesses(Use(use="my_tools:search"), num=4).call(query="maps")`.
    """

    def __init__(self, use: Use, *, num: int) -> None:
        self._use = use
        self.turns = asyncio.Semaphore(num)
        """A caller waits here for a free process. Its deadline begins only after that."""
        self._idle: list[KeptObject] = []

    async def call(self, **arguments: object) -> str:
        """Calls the function and returns its result as text. Cancellation kills the process.

        Raises: ToolFailedError if the function raises; RolloutError if the function raises that, can't be
        loaded, or ends its process.
        """
        target = f"{ToolServer.__module__}:{ToolServer.__name__}"
        process = self._idle.pop() if self._idle else await KeptObject.start(target, self._use)
        try:
            # The shared state of an episode's tools may contain objects that can't be pickled.
            given = {
                name: replace(value, state={}) if isinstance(value, ToolContext) else value
                for name, value in arguments.items()
            }
            reply: ToolReply = await process.call("call", given)
        except ObjectLostError as err:
            await process.end()
            what = f"the process of the tool {self._use.use} {err}"
            raise RolloutError(what, is_retryable=isinstance(err, InvalidAnswerError)) from err
        except BaseException:
            await process.end()
            raise
        self._idle.append(process)
        if reply.is_broken:
            raise RolloutError(reply.text, is_retryable=reply.is_retryable)
        if reply.is_error:
            raise ToolFailedError(reply.text)
        return reply.text
