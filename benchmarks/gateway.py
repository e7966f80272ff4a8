"""Measures what the agents' gateway adds to a request while 500 episodes are open, and hosted episodes per
second.

    python benchmarks/gateway.py [--episodes N] [--turns N] [--rounds N] [--hosted N]

Each episode has its own address and key. Its client holds a conversation of `--turns` requests to OpenAI's
chat completions API, each with the whole history, as agent programs do. The clients run in another process.
The engine takes 20 ms per token, so a request's time in the engine is known: `max_tokens` of the request, 100
to 300, times 20 ms. `gateway_p99_ms` is the 99th percentile of the time that a client waited beyond that:
network, decoding, the chat template, the recorder, and the event loop while it is busy with other episodes.

The baseline, in the same run and with the same clients, is `bare_p99_ms` of a server without episodes. It
decodes the request, waits as long as the engine would, and sends a reply of the same length. What the
baseline adds is due to the clients, the network, and the machine. `gateway_cpu_ms` and `bare_cpu_ms` are the
CPU time of each server per request.

`hosted_episodes_per_s` counts episodes of the task set `examples/verifiers_sums.py`, run by `verifiers` in
its own Python, with an engine that responds immediately. It is measured only if `.venv-verifiers` exists.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.addons.agents.config import HostedConfig
from astraflow.addons.agents.hosted import Hosted
from astraflow.addons.agents.hosts.config import HostedSourceConfig
from astraflow.addons.agents.hosts.host import Host
from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.config import parse_config
from astraflow.protocols import Capacity
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.renderer import load_renderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.service.process import settle_memory
from astraflow.service.server import HttpServer
from astraflow.service.web_guard import WebRules
from astraflow.tasks.sources import make_source
from astraflow.types import BusySpan, GenerateRequest, Generation, PolicyInfo, Sampling, Task
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.workflows.calls import tagged_calls
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from harness import Runs, report, show_table
from lean_http import LeanTransport

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-verifiers"
MAX_P99_MS = 20.0
MIN_HOSTED_PER_S = 40.0
TOKEN_S = 0.02
"""Seconds per token of an engine: 50 tokens per second and request."""
FEWEST = 100
MOST = 300
"""Largest number of tokens of a completion; 100 to 300 tokens take 2 to 6 s."""
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=.,?"
HOSTED_AT_ONCE = 64
NUM_WARMING = 8
"""Number of episodes with one request that run before the measured ones."""


# --- the engine -----------------------------------------------------------------------------------


class KnownEngine:
    """An engine that takes `token_s` per token, and always generates as many tokens as allowed."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    async def generate(self, request: GenerateRequest) -> Generation:
        num = request.sampling.max_tokens
        await asyncio.sleep(num * self._token_s)
        ids = tuple(4 + (place % 10) for place in range(num))
        return Generation(token_ids=ids, logprobs=(-0.25,) * num, versions=(0,) * num, finish_reason="length")

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.zeros(len(token_ids) - 1, np.float32)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def capacity(self) -> Capacity:
        return Capacity(num_slots=1024, num_running=0, num_waiting=0, max_context=100_000, generated_tokens=0)

    def take_spans(self) -> tuple[BusySpan, ...]:
        return ()

    async def close(self) -> None: ...


def hosted_policy(folder: Path, engine: KnownEngine, *, max_tokens: int) -> HostedPolicy:
    """Makes a policy with a real tokenizer and chat template."""
    make_tokenizer(TokenizerConfig(characters=CHARACTERS)).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    info = PolicyInfo(name="actor", is_trained=True, sampling=sampling, max_lag=1)
    return HostedPolicy(info, engine, load_renderer(folder))


# --- the clients, in a process of their own -------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """The address and the key of an episode's endpoint."""

    url: str
    key: str


def serve_clients(pipe: Connection) -> None:
    """Plays the clients of each list of addresses that arrives through the pipe. Responds with their waiting
    times."""
    while (asked := pipe.recv()) is not None:
        addresses, num_turns = asked
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            pipe.send(runner.run(_clients(addresses, num_turns)))


async def _clients(addresses: Sequence[Address], num_turns: int) -> list[float]:
    waited = await asyncio.gather(
        *(_client(address, num_turns, seed) for seed, address in enumerate(addresses))
    )
    return [each for turns in waited for each in turns]


async def _client(address: Address, num_turns: int, seed: int) -> list[float]:
    """Returns the milliseconds beyond the engine's time, one per turn."""
    dice = random.Random(seed)
    http = LeanTransport(address.url, num_connections=1)
    headers = {"authorization": f"Bearer {address.key}", "content-type": "application/json"}
    path = f"/{address.url.partition('://')[2].partition('/')[2]}/chat/completions"
    messages: list[dict[str, str]] = [{"role": "system", "content": "you add numbers. " * 10}]
    beyond: list[float] = []
    await asyncio.sleep(dice.uniform(0.0, MOST * TOKEN_S))
    for _ in range(num_turns):
        num = dice.randint(FEWEST, MOST)
        asked = f"what is {dice.randint(0, 999)} + {dice.randint(0, 999)}? " * 4
        messages.append({"role": "user", "content": asked})
        body = msgspec.json.encode({"model": "actor", "messages": messages, "max_tokens": num})
        began_s = time.perf_counter()
        reply = await http.request("POST", path, headers=headers, body=body, timeout_s=120.0)
        took_s = time.perf_counter() - began_s
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.body[:500]!r}")
        beyond.append(1000 * (took_s - num * TOKEN_S))
        said = json.loads(reply.body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
    await http.close()
    return beyond


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve_clients, args=(other,), daemon=True)
        self._process.start()

    async def play(self, addresses: Sequence[Address], num_turns: int) -> list[float]:
        """Returns the milliseconds that each turn waited beyond the engine's time."""
        self._pipe.send((list(addresses), num_turns))
        return await asyncio.to_thread(self._pipe.recv)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


# --- the two servers ------------------------------------------------------------------------------


class OpenEpisodes:
    """A workflow whose episodes stay open until all clients are done."""

    def __init__(self, num: int) -> None:
        self.addresses: list[Address] = []
        self._num = num
        self.all_are_open = asyncio.Event()
        self.is_over = asyncio.Event()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        async with policies.endpoint() as endpoint:
            self.addresses.append(Address(endpoint.base_url, endpoint.api_key))
            if len(self.addresses) == self._num:
                self.all_are_open.set()
            await self.is_over.wait()
        rewards = Rewards()
        rewards.add_all("actor", 1.0)
        rewards.set_score(1.0)
        return rewards


async def gateway_ms(
    clients: Clients, hosted: HostedPolicy, num_episodes: int, num_turns: int
) -> list[float]:
    """Returns how long the clients of this number of open episodes waited beyond the engine's time."""
    workflow = OpenEpisodes(num_episodes)

    async def no_score(task: Task, text: str) -> float:
        raise AssertionError("the workflow scores itself")

    async with EpisodeRunner({"actor": hosted}, workflow, no_score, timeout_s=3600.0) as runner:
        task = Task(id="sums/0", source="sums", prompt="2 + 3", answer="5")
        episodes = [asyncio.create_task(runner.episode(task, seed=seed)) for seed in range(num_episodes)]
        await workflow.all_are_open.wait()
        waited = await clients.play(workflow.addresses, num_turns)
        workflow.is_over.set()
        recorded = sum(len(episode.trajectories) for episode in await asyncio.gather(*episodes))
        assert recorded >= num_episodes
    return waited


async def bare_ms(clients: Clients, num_episodes: int, num_turns: int) -> list[float]:
    """Returns how long the same clients waited beyond the engine's time at a server that only waits."""

    async def answer(request: Request) -> Response:
        asked = json.loads(await request.body())
        num = asked["max_tokens"]
        await asyncio.sleep(num * TOKEN_S)
        message = {"role": "assistant", "content": "7" * num}
        return Response(
            msgspec.json.encode({"choices": [{"message": message}]}), media_type="application/json"
        )

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    server = HttpServer(app, host="127.0.0.1", port=0, name="bare", rules=WebRules(needs_token=True))
    url = await server.start()
    try:
        return await clients.play([Address(f"{url}/v1", "key")] * num_episodes, num_turns)
    finally:
        await server.stop(grace_s=0.2)


# --- hosted episodes ------------------------------------------------------------------------------


@asynccontextmanager
async def hosted_runner(hosted: HostedPolicy) -> AsyncGenerator[tuple[EpisodeRunner, Task]]:
    """Yields a runner of `verifiers` in its own Python, and one of its tasks."""
    agent = {"harness": {"id": "astraflow_chat"}, "runtime": {"type": "subprocess"}}
    section: dict[str, Any] = {
        "name": "hosted",
        "python": str(VENV),
        "serve": "verifiers",
        "args": {"taskset": {"id": "verifiers_sums", "size": 8}, "agent": agent},
    }
    settings = parse_config(section, HostedConfig)
    task = make_source(HostedSourceConfig(limit=1), name="sums", workflow=settings).task(0)

    async def no_score(task: Task, text: str) -> float:
        raise AssertionError("the host scores itself")

    async with EpisodeRunner(
        {"actor": hosted}, Hosted(settings, tagged_calls, Host(settings)), no_score, timeout_s=600.0
    ) as runner:
        yield runner, task


async def hosted_per_s(hosted: HostedPolicy, num_episodes: int) -> float:
    """Returns the episodes per second, after one warm-up episode per slot."""
    sys.path.insert(0, str(ROOT / "examples"))
    left = iter(range(num_episodes))

    async with hosted_runner(hosted) as (runner, task):

        async def slot() -> None:
            for seed in left:
                await runner.episode(task, seed=seed)

        await asyncio.gather(*(runner.episode(task, seed=seed) for seed in range(HOSTED_AT_ONCE)))
        began_s = time.perf_counter()
        await asyncio.gather(*(slot() for _ in range(HOSTED_AT_ONCE)))
        return num_episodes / (time.perf_counter() - began_s)


# --- the benchmark --------------------------------------------------------------------------------


async def measured(given: argparse.Namespace, folder: Path) -> dict[str, Runs]:
    """Measures all figures."""
    found: dict[str, list[float]] = {}
    if given.episodes:
        clients = Clients()
        hosted = hosted_policy(folder, KnownEngine(TOKEN_S), max_tokens=MOST)
        # The first requests of a process import and compile what later ones use.
        await bare_ms(clients, NUM_WARMING, 1)
        await gateway_ms(clients, hosted, NUM_WARMING, 1)
        settle_memory()  # as a rollout service does
        for _ in range(given.rounds):
            for name, play in (
                ("bare", bare_ms(clients, given.episodes, given.turns)),
                ("gateway", gateway_ms(clients, hosted, given.episodes, given.turns)),
            ):
                began_s = time.process_time()
                waited = await play
                cpu_ms = 1000 * (time.process_time() - began_s) / len(waited)
                found.setdefault(f"{name}_cpu_ms", []).append(cpu_ms)
                found.setdefault(f"{name}_p50_ms", []).append(float(np.percentile(waited, 50)))
                found.setdefault(f"{name}_p99_ms", []).append(float(np.percentile(waited, 99)))
        clients.close()
    if given.hosted and VENV.exists():
        hosted = hosted_policy(folder, KnownEngine(0.0), max_tokens=8)
        found["hosted_episodes_per_s"] = [
            await hosted_per_s(hosted, given.hosted) for _ in range(given.rounds)
        ]
    return {name: Runs(tuple(values)) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=500, help="open episodes; 0 leaves the gateway out")
    parser.add_argument("--turns", type=int, default=8, help="requests of each episode")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured, in turns")
    parser.add_argument("--hosted", type=int, default=400, help="hosted episodes; 0 leaves them out")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        figures = runner.run(measured(given, Path(folder)))
    title = f"{given.episodes} open episodes, {given.turns} requests each; the engine takes 2 to 6 s"
    show_table(title, ["figure", "value"], [[name, str(value)] for name, value in figures.items()])
    report(
        figures,
        at_most={"gateway_p99_ms": MAX_P99_MS},
        at_least={"hosted_episodes_per_s": MIN_HOSTED_PER_S},
    )


if __name__ == "__main__":
    main()
