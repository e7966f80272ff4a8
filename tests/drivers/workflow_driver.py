"""Drives any workflow with dice for models: random replies, logprobs that a replay can recompute exactly."""

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from jinja2 import Template

from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.renderer import ChatRenderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest, Generation, Message, ToolSpec, Trajectory
from astraflow.wire import array
from astraflow.workflows.conversation import Workflow
from drivers.environment_fakes import Counting, config_of, task_of
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy

_TOOLS = "{% for t in tools %}[{{ t.name }} {{ t.parameters }}]{% endfor %}"
_OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = _TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}" + _OPEN
STRIPPING = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
)
"""Drops the reasoning of all earlier turns."""
AGENTIC = (
    _TOOLS
    + "{% set ns = namespace(user=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}"
    + "{% if m.role == 'tool' %}"
    + "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}<user>{% endif %}"
    + "<response>{{ m.content }}</response>"
    + "{% if loop.nextitem is undefined or loop.nextitem.role != 'tool' %}<end>\n{% endif %}"
    + "{% elif m.role == 'assistant' and loop.index0 < ns.user %}"
    + "<assistant>{{ m.content.split('</think>')[-1] }}<end>\n"
    + "{% else %}<{{ m.role }}>{{ m.content }}<end>\n{% endif %}{% endfor %}"
    + _OPEN
)
"""Keeps the reasoning of the turns after the last user message, and shows results of tools in one message."""
TEMPLATES = {"plain": PLAIN, "stripping": STRIPPING, "agentic": AGENTIC}

SPECIAL = ("<end>", "<system>", "<user>", "<assistant>", "<tool>")
END = 1

SAYINGS = (
    "yes", "no", "5", "6", "2", "large", "small", "So 5.", "<think>hm, 5?</think>", "<think>no end",
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "2"}}</tool_call>', "<tool_call>{</tool_call>",
    "<task>1+1</task>", "<task>half</task><task>the rest</task>", "\n",
    "<think>split?</think><task>half</task>",
    '<think>add</think><tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
)  # fmt: skip
"""What any of the patterns listens to, right and wrong."""


SAID = "(5|yes|no)"
"""What is a query for the workflow `search`, of all that is said."""


class LetterTokenizer:
    """One id a character; special tokens are ids below 10."""

    def __init__(self, template: str) -> None:
        self._template = Template(template, keep_trailing_newline=True)

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        for idx, special in enumerate(SPECIAL):
            text = text.replace(special, chr(idx + 1))
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in token_ids if i > len(SPECIAL))


def letter_renderer(template: str = "plain") -> ChatRenderer:
    return ChatRenderer(LetterTokenizer(TEMPLATES[template]), frozenset({END}))


Sampled: TypeAlias = Counter[tuple[int, int, int]]
"""(version, digest of all tokens before it, token) -> how many times it was sampled."""


def digests(ids: Sequence[int], start: int = 0) -> list[int]:
    """Digests of the tokens before each position, and of all tokens, continuing from the digest `start`."""
    return list(accumulate(ids, lambda seen, token: zlib.crc32(token.to_bytes(4), seen), initial=start))


def logprob_of(policy: str, version: int, before: int, token: int) -> float:
    """A number that float32 holds exactly, and that another policy, version, prefix or token would change.

    `before` is the digest of the tokens before it.
    """
    seen = zlib.crc32(f"{policy}/{version}/{token}".encode(), before)
    return -(1 + seen % (1 << 20)) / (1 << 16)


class DiceEngine(ScriptedEngine):
    """Says what the dice say; its version rises every few tokens, also within a completion."""

    def __init__(self, policy: str, *, max_context: int = 100_000) -> None:
        super().__init__(max_context=max_context)
        self.policy = policy
        self.sampled: Sampled = Counter()
        self._num_sampled = 0

    def says(self, request: GenerateRequest) -> str:
        """What the dice of a request's seed say."""
        dice = random.Random(request.sampling.seed)
        return " ".join(dice.choices(SAYINGS, k=dice.randint(1, 3)))

    def samples(self, request: GenerateRequest) -> tuple[int, ...]:
        """The tokens of what it says to a request, with the one that ends them."""
        return (*map(ord, self.says(request)), END)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        ids, finish_reason = self._cut(self.samples(request), request.sampling.max_tokens)
        versions = [(self._num_sampled + idx) // 7 for idx in range(len(ids))]
        self._num_sampled += len(ids)
        before = digests(ids, digests(request.token_ids)[-1])
        keys = list(zip(versions, before, ids, strict=False))
        self.sampled.update(keys)
        return Generation(
            token_ids=ids,
            logprobs=tuple(logprob_of(self.policy, *key) for key in keys),
            versions=tuple(versions),
            finish_reason=finish_reason,
        )


class Table:
    """Policies with dice for models, at which a workflow may sit down."""

    def __init__(
        self, names: Sequence[str] = ("actor",), *, template: str = "plain", max_context: int = 100_000
    ) -> None:
        self.engines = {name: DiceEngine(name, max_context=max_context) for name in names}
        self._hosted = {
            name: HostedPolicy(make_policy(name, max_tokens=100), engine, letter_renderer(template))
            for name, engine in self.engines.items()
        }

    async def play(self, workflow: Workflow, *, seed: int = 0) -> Episode:
        environments = Environments({"count": config_of(Counting)})
        await environments.open()
        async with EpisodeRunner(self._hosted, workflow, exact, environments=environments) as runner:
            episode = await runner.episode(task_of("count"), seed=seed)
        await environments.close()
        return episode


def versions_of(trajectory: Trajectory) -> dict[int, int]:
    """Position -> version of the sampled tokens."""
    return {span.start + idx: span.version for span in trajectory.versions for idx in range(span.length)}


def replayed(trajectory: Trajectory) -> Sampled:
    """What the trajectory trains, after a check that a replay of its tokens gives the recorded logprobs."""
    ids = array(trajectory.token_ids, "int32").tolist()
    mask = array(trajectory.mask, "uint8").tolist()
    logprobs = array(trajectory.behavior_logprobs, "float32").tolist()
    before, versions = digests(ids), versions_of(trajectory)
    assert len(ids) == len(mask) == len(logprobs)
    assert sorted(versions) == [idx for idx, is_trained in enumerate(mask) if is_trained]
    expected = [
        logprob_of(trajectory.policy, versions[idx], before[idx], token) if mask[idx] else 0.0
        for idx, token in enumerate(ids)
    ]
    assert logprobs == expected
    return Counter((version, before[idx], ids[idx]) for idx, version in versions.items())
