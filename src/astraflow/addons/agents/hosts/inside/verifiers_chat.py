"""The harness `astraflow_chat` for `verifiers`: a conversation without tools, in the host's own process.

The library's own harnesses start a program for each run of an agent, which takes more than a second. This one
calls the model directly, so it is for task sets that need neither tools nor files. It can be resumed, so
environments can use it for conversations of many turns.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import aiohttp

__all__ = ["chat_harness"]

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)
"""The deadline of the episode bounds its requests."""
_MAX_SHOWN = 2_000
"""Number of characters of a refusal that an error message shows."""


def chat_harness(name: str) -> ModuleType:
    """Makes a module with the harness. The library finds harnesses by the names of modules.

    Raises: ImportError if the library is not installed.
    """
    vf: Any = importlib.import_module("verifiers.v1")
    chat: Any = importlib.import_module("verifiers.v1.dialects.chat")
    base: Any = vf.Harness

    class ChatHarness(base):
        """One request per segment, with the whole conversation."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(  # noqa: PLR0917 - the library's signature
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
        ) -> Any:
            """Runs one segment of a conversation. Returns it as the result of a program."""
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [chat.message_to_wire(message) for message in prompt or ()]
            status, said = await _post(endpoint, secret, {"model": ctx.model, "messages": messages})
            if status != 200:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=said[:_MAX_SHOWN])
            return vf.ProgramResult(exit_code=0, stdout=said, stderr="")

    module = ModuleType(name)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module


async def _post(endpoint: str, secret: str, body: Mapping[str, Any]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=_NO_TIMEOUT) as http,
        http.post(f"{endpoint}/chat/completions", json=body) as answer,
    ):
        return answer.status, await answer.text()
