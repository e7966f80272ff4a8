"""Serves task sets, harnesses, and environments of `verifiers` (its v1 API) in a host.

    workflow:
      name: hosted
      python: .venv-verifiers
      serve: verifiers
      args:
        taskset: {id: my_taskset}
        agent: {harness: {id: astraflow_chat}, runtime: {type: subprocess}}

`args` is the library's `env` section. A policy plays each role for which `args` names neither a model nor a
client. The role requests a model with its own name. Every run of an agent is a part of the episode. Its
session is the id of its trace, which the library sends in `X-Session-ID` with each request.

An episode that is not `ok` fails. Runs that are not `trainable` are left out of training.

Source: verifiers/v1/serve/server.py of https://github.com/PrimeIntellect-ai/verifiers, 0.4.0.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from types import ModuleType
from typing import Any

import aiohttp

from astraflow.addons.agents.hosts.inside.main import HostedEpisode
from astraflow.addons.agents.hosts.inside.relay import Relay

__all__ = ["EpisodeFailedError", "VerifiersHost"]

_CHAT_HARNESS = "astraflow_chat"
"""Id of a harness that this package adds: a conversation without tools, in the host's own process.

The library's own harnesses start a program for each run of an agent, which takes more than a second. This one
calls the model directly, so it is for task sets that need neither tools nor files. It can be resumed, so
environments can use it for conversations of many turns.
"""
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=None)
"""The deadline of the episode bounds the requests of the harness."""
_MAX_REFUSAL_CHARS = 2_000
"""Number of characters of a refusal that an error message shows."""
_KEY_VARIABLE = "ASTRAFLOW_API_KEY"
"""The library takes a key by the name of a variable, and hides variables with API_KEY from programs."""
_OLDEST = (0, 4)
_MAX_METRICS = 48
"""Largest number of metrics of an episode. The protocol has room for a few more."""
_ID_CHARS = 12
"""Number of characters of a task's key in its id. The key is a hash; the position makes the id unique."""


class EpisodeFailedError(Exception):
    """An episode that is not `ok`. Bugs in the environment's own code are not tried again."""

    def __init__(self, error: Any) -> None:
        """`error`: the last error that the library recorded, or None."""
        message = "the episode is not ok, and no error was recorded" if error is None else str(error.message)
        super().__init__(message)
        self.error_class = "EpisodeNotOk" if error is None else str(error.type)
        self.is_retryable = self.error_class not in {"TaskError", "EnvError", "ToolsetError"}


class VerifiersHost:
    """One environment of the library. Example: `VerifiersHost(taskset={"id": "gsm8k"}, agent={...})`."""

    library = "verifiers"

    def __init__(self, **env: Any) -> None:
        """`env`: the library's `env` section.

        Raises: whatever the library raises for a section that it cannot use.
        """
        self.version = version("verifiers")
        if tuple(int(part) for part in self.version.split(".")[:2]) < _OLDEST:
            raise RuntimeError(f"verifiers {self.version} is too old; 0.4 or newer is needed (its v1 API)")
        self._vf: Any = importlib.import_module("verifiers.v1")
        sys.modules.setdefault(_CHAT_HARNESS, _chat_harness())
        config = self._vf.resolve_env_config(env)
        seats = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(config)
        self.roles = [name for name, seat in seats.items() if seat.model is None and seat.client is None]
        if not self.roles:
            raise ValueError("every role has its own model or client, so no policy would play")
        own = {name: seats[name].model_copy(update={"model": name}) for name in self.roles}
        self._env: Any = self._vf.load_environment(config.model_copy(update=own))
        self._task_type: Any = type(self._env.taskset).task_type()
        self._serving = AsyncExitStack()
        self._relay = Relay()

    async def open(self) -> None:
        """Starts what the episodes share: the tool servers, and what the environment itself starts."""
        await self._relay.start()
        self._serving.push_async_callback(self._relay.close)
        os.environ[_KEY_VARIABLE] = self._relay.key
        client = self._vf.EvalClientConfig(base_url=self._relay.url, api_key_var=_KEY_VARIABLE)
        self._context: Any = self._vf.ModelContext(model="", client=client)
        await self._serving.enter_async_context(self._env.serving())

    async def close(self) -> None:
        """Ends what `open` started."""
        await self._serving.aclose()

    def tasks(self, split: str) -> Iterator[Mapping[str, Any]]:
        """All tasks of the task set, in order. Raises: ValueError for a split, because it has none."""
        if split:
            raise ValueError(
                f"split = {split!r}: a task set has no splits; choose tasks with `args.taskset`, or with "
                "`skip` and `limit`"
            )
        data_type = self._task_type.data_type()
        if excluded := [name for name, field in data_type.model_fields.items() if field.exclude]:
            raise ValueError(f"{data_type.__name__} excludes {excluded}, so its tasks cannot be sent")
        for task in self._env.taskset:
            yield {
                "id": f"{task.data.idx}-{task.key[:_ID_CHARS]}",
                "prompt": task.data.prompt_text,
                "data": task.data.model_dump(mode="json"),
            }

    async def run(self, data: Mapping[str, Any], episode: HostedEpisode) -> Mapping[str, Any]:
        """Runs an episode. Raises: EpisodeFailedError if it is not `ok`."""
        task = self._task_type(
            self._task_type.data_type().model_validate(data), self._env.config.taskset.task
        )
        (slot,) = self._env.slots(task)
        with self._relay.sessions(episode) as sessions:

            def watch(trace: Any) -> None:
                sessions.add(trace.id)

            outcome = await self._env.run_slot(slot, self._context, on_trace=watch)
        if not outcome.ok:
            errors: list[Any] = [
                trace.last_error for trace in outcome.traces if not trace.ok and trace.last_error
            ]
            raise EpisodeFailedError(outcome.last_error or (errors[-1] if errors else None))
        traces = [trace for trace in outcome.traces if trace.agent.name in self.roles]
        trained = [trace.reward for trace in traces if trace.agent.trainable]
        return {
            "parts": [
                {
                    "role": trace.agent.name,
                    "session": trace.id,
                    "reward": trace.reward,
                    "is_trained": trace.agent.trainable,
                }
                for trace in traces
            ],
            "score": sum(trained) / len(trained) if trained else 0.0,
            "metrics": _metrics(traces, names_role=len(self.roles) > 1),
        }


def _metrics(traces: Sequence[Any], *, names_role: bool) -> dict[str, float]:
    """The mean of each reward and metric over the runs of a role."""
    by_name: dict[str, list[float]] = {}
    for trace in traces:
        where = f"{trace.agent.name}/" if names_role else ""
        rewards = {f"reward/{name}": each.score for name, each in trace.rewards.items() if each is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in {**rewards, **metrics}.items():
            by_name.setdefault(f"{where}{name}", []).append(float(value))
    means = {name: sum(values) / len(values) for name, values in by_name.items()}
    return dict(list(means.items())[:_MAX_METRICS])


def _chat_harness() -> ModuleType:
    """Makes a module with the harness. The library finds harnesses by the names of modules."""
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
            status, answer = await _post(endpoint, secret, {"model": ctx.model, "messages": messages})
            if status != 200:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=answer[:_MAX_REFUSAL_CHARS])
            return vf.ProgramResult(exit_code=0, stdout=answer, stderr="")

    module = ModuleType(_CHAT_HARNESS)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module


async def _post(endpoint: str, secret: str, body: Mapping[str, Any]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=_NO_TIMEOUT) as http,
        http.post(f"{endpoint}/chat/completions", json=body) as answer,
    ):
        return answer.status, await answer.text()
