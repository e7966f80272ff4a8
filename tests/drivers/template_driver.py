"""Random conversations of agent programs over the chat templates of 12 families, and what must be recorded.

Each family has a tokenizer of byte pairs that merges everything between two special tokens: the end of an
opening with the text behind it, words with white space. What a model samples is split at random, so its
tokens are hardly ever those that its text is encoded to. A client talks to the episode's endpoint as agents
do: it goes on from any point, again and at the same time, calls tools, asks for several answers, compacts and
edits its history. The driver keeps its own account of which requests must fork, by each family's own rule.
"""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.addons.agents.gateway.chat_wire import ChatRequest, Choice
from astraflow.addons.agents.gateway.endpoint import EpisodeEndpoint
from astraflow.addons.agents.gateway.gateway import Gateway
from astraflow.rollout.dialogue import Dialogue, HostedPolicy
from astraflow.rollout.renderer import ChatRenderer, load_renderer
from astraflow.types import GenerateRequest
from astraflow.workflows.calls import tagged_calls
from drivers.rollout_fakes import make_policy
from drivers.workflow_driver import DiceEngine, Sampled, replayed

__all__ = ["FAMILIES", "TEMPLATE_DIR", "Account", "Family", "Model", "make_template_model", "play_template"]

TEMPLATE_DIR = Path(__file__).parents[1] / "chat_templates"

Said: TypeAlias = dict[str, Any]
"""A message as a client sends it."""
Rule: TypeAlias = Callable[[Sequence[Said], Sequence[Said]], bool]
"""Whether a template no longer shows a history as it did for its last reply, once new messages follow."""


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of chat templates."""

    name: str
    special: tuple[str, ...]
    """Tokens that text is split at."""
    stops: tuple[str, ...]
    """Tokens that end a reply."""
    rewrites: Rule = lambda history, new: False


def _reasons(message: Said) -> bool:
    return message["role"] == "assistant" and "</think>" in (message["content"] or "")


def _drops_reasoning(history: Sequence[Said], new: Sequence[Said]) -> bool:
    """The reasoning of each reply that is not the newest is dropped."""
    return _reasons(history[-1])


def _drops_reasoning_before_the_user(history: Sequence[Said], new: Sequence[Said]) -> bool:
    """The reasoning of replies is dropped once the user says something new."""
    asked = max(idx for idx, message in enumerate(history) if message["role"] == "user")
    return any(message["role"] == "user" for message in new) and any(map(_reasons, history[asked:]))


def _moves_the_system_prompt(history: Sequence[Said], new: Sequence[Said]) -> bool:
    return history[0]["role"] == "system" and any(message["role"] == "user" for message in new)


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2_5", _CHATML, ("<|im_end|>", "<|endoftext|>")),
        Family("qwen3", _CHATML, ("<|im_end|>", "<|endoftext|>"), _drops_reasoning_before_the_user),
        Family(
            "llama3",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            ("<|eot_id|>", "<|eom_id|>"),
        ),
        Family(
            "mistral",
            ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]"),
            ("</s>",),
            _moves_the_system_prompt,
        ),
        Family("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>")),
        Family(
            "phi4",
            ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_response|>",
             "<|end|>", "<|endoftext|>"),
            ("<|end|>", "<|endoftext|>"),
        ),
        Family(
            "deepseek_r1",
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
             "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
             "<｜tool▁output▁end｜>"),
            ("<｜end▁of▁sentence｜>",),
            _drops_reasoning,
        ),
        Family("granite", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), ("<|end_of_text|>",)),
        Family(
            "glm4_5",
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
             "<|endoftext|>"),
            ("<|user|>", "<|observation|>", "<|endoftext|>"),
            _drops_reasoning_before_the_user,
        ),
        Family(
            "command_r",
            ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
             "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
            ("<|END_OF_TURN_TOKEN|>",),
        ),
        Family("olmo2", ("<|endoftext|>",), ("<|endoftext|>",)),
        Family(
            "kimi_k2",
            ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
            ("<|im_end|>",),
        ),
    )
}  # fmt: skip

_WORDS = (
    "yes", "no", "So 5.", " 6\n", "\n\n", "größer", "多い", "🙂", "ab", "abab", "  ", "a\n", "{", "```",
)  # fmt: skip
"""What replies are made of: nothing that a special token begins with, and some of more than one byte."""
_CALL = '<tool_call>{"name": "add", "arguments": {"b": 3, "a": 2}}</tool_call>'
_ADD: Said = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def _tokenizer(family: Family) -> Tokenizer:
    """Byte pairs over everything between two special tokens, merged as often as the template's own text
    and the replies have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    dice = random.Random(5)
    template = (TEMPLATE_DIR / f"{family.name}.jinja").read_text(encoding="utf-8").replace("\\n", "\n")
    said = ["".join(("\n", *dice.choices(_WORDS, k=8), "\n")) for _ in range(40)]
    corpus = [*template.splitlines(keepends=True), *said, _CALL * 3]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in family.special]
    )
    return tokenizer


@dataclass(frozen=True)
class Model:
    """A family's tokenizer and template, as a rollout service loads them."""

    family: Family
    tokenizer: Tokenizer
    renderer: ChatRenderer


def make_template_model(family: Family, folder: Path) -> Model:
    """Writes a model's folder as Hugging Face has them, and loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_bytes((TEMPLATE_DIR / f"{family.name}.jinja").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.stops[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    stops = [tokenizer.token_to_id(stop) for stop in family.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    return Model(family, tokenizer, load_renderer(folder))


# --- a policy ---------------------------------------------------------------------------------------


class SplittingEngine(DiceEngine):
    """Says what its dice say, in tokens that encoding the text would hardly ever give."""

    def __init__(self, model: "Model") -> None:
        super().__init__("actor", max_context=1_000_000)
        self._tokenizer = model.tokenizer
        self._stops = [model.tokenizer.token_to_id(stop) for stop in model.family.stops]
        self._numbers = 0
        self.num_merged = 0
        """Replies whose text is encoded to other tokens than those that were sampled."""

    def samples(self, request: GenerateRequest) -> tuple[int, ...]:
        """Tokens of a text that no other reply of the episode has, encoded piece by piece."""
        self._numbers += 1
        dice = random.Random(request.sampling.seed)
        text = self._says(dice)
        cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(0, 4)))
        bounds = zip((0, *cuts), (*cuts, len(text)), strict=True)
        ids = [token for start, end in bounds for token in self._encode(text[start:end])]
        self.num_merged += ids != self._encode(text)
        return (*ids, dice.choice(self._stops))

    def _says(self, dice: random.Random) -> str:
        said = "".join(dice.choices(_WORDS, k=dice.randint(1, 6)))
        reasoning = f"<think>{self._numbers}. {dice.choice(_WORDS)}</think>" if dice.random() < 0.4 else ""
        calls = _CALL * dice.choice((0, 0, 1, 2))
        return f"{reasoning}{self._numbers}: {said}{calls}"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


# --- a client ---------------------------------------------------------------------------------------


@dataclass
class _Point:
    """A reply, at the end of the history that a client has of it."""

    history: tuple[Said, ...]
    is_extended: bool = False
    """Whether a request has gone on from its very tokens."""


@dataclass
class Account:
    """What must be recorded of an episode, and what was."""

    num_begun: int = 0
    """Conversations."""
    num_forks: int = 0
    """Requests that must fork."""
    num_extended: int = 0
    """Requests that must extend a trajectory."""
    recorded: Counter[str] = field(default_factory=Counter[str])

    def check(self) -> None:
        """Compares both."""
        assert self.recorded["forks"] == self.num_forks
        assert self.recorded["trajectories"] == self.num_begun + self.num_forks
        assert self.recorded["turns"] == self.num_begun + self.num_forks + self.num_extended


class _Client:
    """An agent program that does whatever its dice say."""

    def __init__(self, family: Family, endpoint: EpisodeEndpoint, dice: random.Random) -> None:
        self.account = Account()
        self._family = family
        self._endpoint = endpoint
        self._dice = dice
        self._points: list[_Point] = []
        self._has_tools = dice.random() < 0.6
        self._num_said = 0

    async def act(self) -> None:
        """Sends one or several requests."""
        acts = (self._goes_on, self._goes_on, self._goes_on, self._retries, self._branches, self._edits,
                self._compacts, self._begins)  # fmt: skip
        await (self._dice.choice(acts) if self._points else self._begins)()

    async def _begins(self) -> None:
        system = [self._said("system")] if self._dice.random() < 0.5 else []
        await self._asks_anew([*system, self._said("user")])

    async def _compacts(self) -> None:
        """A summary instead of what was said, with or without the newest reply."""
        history = self._dice.choice(self._points).history
        system = [message for message in history[:1] if message["role"] == "system"]
        newest = [self._sent_back(history[-1])] if self._dice.random() < 0.5 else []
        # A result must not follow that belongs to a call of a reply that is gone.
        told = [*self._results(newest[0]), self._said("user")] if newest else []
        await self._asks_anew([*system, self._said("user"), *newest, *told])

    async def _goes_on(self) -> None:
        await self._extends(self._dice.choice(self._points))

    async def _retries(self) -> None:
        """The same request twice, as after a lost answer."""
        point = self._dice.choice(self._points)
        new = self._new(point)
        for _ in range(2):
            await self._extends(point, new)

    async def _branches(self) -> None:
        """Several requests at the same time, from the same point or from several."""
        chosen = self._dice.choices(self._points, k=3)
        await asyncio.gather(*(self._extends(point) for point in chosen))

    async def _edits(self) -> None:
        """Another reply in the place of the policy's, or the same without its reasoning."""
        point = self._dice.choice(self._points)
        reply = point.history[-1]
        text = reply["content"] or ""
        stripped = text.rpartition("</think>")[2] if self._dice.random() < 0.5 else text
        if stripped == text:
            self._num_said += 1
            stripped = f"edited {self._num_said}"
        edited = {**reply, "content": stripped}
        choices = await self._asks([*point.history[:-1], edited, *self._new(point)])
        self.account.num_forks += len(choices)

    # --- requests ---

    async def _asks_anew(self, messages: Sequence[Said]) -> None:
        choices = await self._asks(messages)
        self.account.num_begun += len(choices)

    async def _extends(self, point: _Point, new: Sequence[Said] = ()) -> None:
        new = new or self._new(point)
        if self._family.rewrites(point.history, new):
            num_free = 0
        else:
            num_free = 0 if point.is_extended else 1
            point.is_extended = True
        choices = await self._asks([*point.history[:-1], self._sent_back(point.history[-1]), *new])
        self.account.num_extended += num_free
        self.account.num_forks += len(choices) - num_free

    async def _asks(self, messages: Sequence[Said]) -> tuple[Choice, ...]:
        asked: Said = {"model": "actor", "messages": list(messages), "n": self._dice.choice((1, 1, 1, 1, 2))}
        if self._has_tools:
            asked["tools"] = [_ADD]
        if self._dice.random() < 0.1:
            asked["max_tokens"] = self._dice.randint(16, 28)
        completed = await self._endpoint.chat(msgspec.convert(asked, ChatRequest))
        for choice in completed.choices:
            reply = msgspec.to_builtins(choice.message)
            self._points.append(_Point((*messages, reply)))
        return completed.choices

    # --- messages ---

    def _said(self, role: str) -> Said:
        self._num_said += 1
        return {"role": role, "content": f"{role} {self._num_said} {self._dice.choice(_WORDS)}?"}

    def _new(self, point: _Point) -> list[Said]:
        results = self._results(point.history[-1])
        return [*results, self._said("user")] if not results or self._dice.random() < 0.2 else results

    def _results(self, reply: Said) -> list[Said]:
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": f"total:{place}\n"}
            for place, call in enumerate(reply.get("tool_calls", ()))
        ]

    def _sent_back(self, reply: Said) -> Said:
        """A reply as it is, or as clients change it without a change of what it says."""
        if self._dice.random() < 0.5:
            return reply
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True),
                },
            }
            for call in reply.get("tool_calls", ())
        ]
        return {"role": "assistant", "content": (reply["content"] or "").strip(), "tool_calls": calls}


# --- one episode ------------------------------------------------------------------------------------


async def play_template(model: Model, *, seed: int) -> Account:
    """Plays an episode: each sampled token must be trained once, behind the very tokens that it was
    sampled behind, and exactly the requests fork that must."""
    engine = SplittingEngine(model)
    hosted = {"actor": HostedPolicy(make_policy("actor", max_tokens=500), engine, model.renderer)}
    dialogue = Dialogue(hosted, seed=seed, open_endpoint=Gateway().endpoint)
    endpoint = EpisodeEndpoint(dialogue, tagged_calls, "http://127.0.0.1:1")
    dice = random.Random(f"{model.family.name} {seed}")
    client = _Client(model.family, endpoint, dice)
    for _ in range(dice.randint(1, 8)):
        await client.act()
    trajectories = dialogue.recorder.trajectories({}, {})
    trained: Sampled = sum((replayed(trajectory) for trajectory in trajectories), Counter())
    assert trained == engine.sampled, "a token was trained behind others than it was sampled behind"
    account = client.account
    account.recorded["forks"] = dialogue.recorder.num_forks
    account.recorded["trajectories"] = len(trajectories)
    account.recorded["turns"] = sum(len(trajectory.turns) for trajectory in trajectories)
    account.recorded["merged"] = engine.num_merged
    account.check()
    return account
