"""What hosts of tests serve. It runs in the host's own process, so it imports the standard library alone."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Blocking", "Endless", "Games", "Torn", "Twins"]


class Games:
    """Does what the data of a task says (`does`); by default each role is asked once, and `5` is worth 1."""

    version = "7"

    def __init__(self, roles: tuple[str, ...] = ("agent",), size: int = 5) -> None:
        self.roles = roles
        self.size = size

    def tasks(self, split: str) -> Iterator[Mapping[str, Any]]:
        for idx in range(self.size):
            yield {"id": f"{split}{idx}", "prompt": f"{idx}+3", "data": {"prompt": f"Calculate {idx} + 3."}}

    async def run(self, data: Mapping[str, Any], episode: Any) -> Any:
        does = getattr(self, f"_{data.get('does', 'plays')}")
        return await does(data, episode)

    async def _plays(self, data: Mapping[str, Any], episode: Any) -> Any:
        parts: list[dict[str, Any]] = []
        for role in self.roles:
            text = await ask_role(episode, role, data.get("prompt", "2+3"))
            parts.append({"role": role, "reward": float(text == "5")})
        return {"parts": parts, "score": parts[0]["reward"], "metrics": {"length": 3}}

    async def _rivals(self, data: Mapping[str, Any], episode: Any) -> Any:
        """One role plays twice, says the same twice in both games, and is worth something else in each."""
        for session in ("a", "b"):
            text = await ask_role(episode, "agent", "2+3", session=session)
            await ask_role(episode, "agent", "2+3", text, "Sure?", session=session)
        await ask_role(episode, "agent", "a retry that was given up", session="c")
        await ask_role(episode, "judge", "who?")
        return {
            "parts": [
                {"role": "agent", "session": "a", "reward": 1.0},
                {"role": "agent", "session": "b", "reward": -1.0},
                {"role": "judge", "reward": 9.0, "is_trained": False},
            ],
            "score": 0.25,
        }

    async def _nan(self, data: Mapping[str, Any], episode: Any) -> Any:
        return {**await self._plays(data, episode), "score": float("nan")}

    async def _infinite(self, data: Mapping[str, Any], episode: Any) -> Any:
        return {**await self._plays(data, episode), "score": 1e300}

    async def _huge(self, data: Mapping[str, Any], episode: Any) -> Any:
        return {**await self._plays(data, episode), "note": "x" * (17 << 20)}

    async def _more(self, data: Mapping[str, Any], episode: Any) -> Any:
        return {**await self._plays(data, episode), "note": "x"}

    async def _list(self, data: Mapping[str, Any], episode: Any) -> Any:
        return [1.0]

    async def _doubles(self, data: Mapping[str, Any], episode: Any) -> Any:
        ended = await self._plays(data, episode)
        return {**ended, "parts": ended["parts"] * 2}

    async def _silent(self, data: Mapping[str, Any], episode: Any) -> Any:
        return {"parts": [{"role": "agent", "reward": 1.0}], "score": 1.0}

    async def _strays(self, data: Mapping[str, Any], episode: Any) -> Any:
        await ask_role(episode, "agent", "2", model="gpt")

    async def _raises(self, data: Mapping[str, Any], episode: Any) -> Any:
        raise ValueError("a bug of the game")

    async def _forks(self, data: Mapping[str, Any], episode: Any) -> Any:
        """Forks, and the fork plays, too."""
        os.fork()
        await asyncio.sleep(0.02)
        return await self._plays(data, episode)

    async def _down(self, data: Mapping[str, Any], episode: Any) -> Any:
        raise ConnectionError("the world is down")

    async def _exits(self, data: Mapping[str, Any], episode: Any) -> Any:
        sys.exit(3)

    async def _waits(self, data: Mapping[str, Any], episode: Any) -> Any:
        await ask_role(episode, "agent", "2+3")
        await asyncio.sleep(60)

    async def _dies(self, data: Mapping[str, Any], episode: Any) -> Any:
        os.write(1, b"my last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    async def _hangs(self, data: Mapping[str, Any], episode: Any) -> Any:
        time.sleep(60)  # noqa: ASYNC251 - that is how a host hangs

    async def _leaves(self, data: Mapping[str, Any], episode: Any) -> Any:
        """Starts a child in a session of its own, and says both numbers."""
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = await asyncio.create_subprocess_exec(*sleeper, start_new_session=True)
        await asyncio.to_thread(Path(data["path"]).write_text, f"{os.getpid()} {child.pid}")
        await asyncio.sleep(60)


class Blocking(Games):
    """A `run` that is not async, in a thread that nothing can end."""

    def run(self, data: Mapping[str, Any], episode: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if data.get("does") == "hangs":
            time.sleep(60)
        if data.get("does") == "forks":
            os.fork()
            data = {}
        return asyncio.run(super().run(data, episode))


class Endless(Games):
    """Tasks without an end."""

    def tasks(self, split: str) -> Iterator[Mapping[str, Any]]:
        idx = 0
        while True:
            yield {"id": str(idx), "data": idx}
            idx += 1


class Twins(Games):
    """Two tasks with one id."""

    def tasks(self, split: str) -> Iterator[Mapping[str, Any]]:
        yield {"id": "same", "data": 1}
        yield {"id": "same", "data": 2}


class Torn(Games):
    """Tasks of which one is no JSON."""

    def tasks(self, split: str) -> Iterator[Mapping[str, Any]]:
        yield {"id": "0", "data": 1}
        yield {"id": "1", "data": float("nan")}


async def ask_role(episode: Any, role: str, *said: str, session: str = "", model: str = "") -> str:
    """What a role answers in a conversation, in which user and role took turns."""
    names = ("user", "assistant")
    messages = [{"role": names[idx % 2], "content": text} for idx, text in enumerate(said)]
    body = {"model": model or episode.models[role], "messages": messages}
    headers = {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"}
    if session:
        headers["X-Session-ID"] = session
    request = urllib.request.Request(
        f"{episode.base_url}/chat/completions", json.dumps(body).encode(), headers
    )

    def posted() -> str:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    return await asyncio.to_thread(posted)
