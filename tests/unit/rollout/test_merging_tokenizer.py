"""Conversations under a tokenizer that merges: what was sampled is not what encoding its text gives.

A tokenizer of one id per character cannot tell the tokens of a prefix from a conversation that was rendered
again at each turn. This one can: `ab` is one token, and so is `b` with what the template puts after it.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import BPE

from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.renderer import ChatRenderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest, Generation, Message, ToolSpec
from astraflow.wire import array
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task

LETTERS = ("a", "b", "c", "?", "|", "\n")
MERGES = (("a", "b"), ("ab", "c"), ("b", "\n"), ("\n", "a"))
VOCABULARY = {piece: idx for idx, piece in enumerate((*LETTERS, *("".join(pair) for pair in MERGES)))}
STOP = VOCABULARY["|"]
SAMPLED = (VOCABULARY["a"], VOCABULARY["b"], VOCABULARY["c"], STOP)
"""`abc` as the model sampled it, token by token; encoded, it is one token."""


class MergingTokenizer:
    """Byte pairs over a few letters; each message ends with `|` and a line break."""

    def __init__(self) -> None:
        self._bpe = Tokenizer(BPE(vocab=VOCABULARY, merges=list(MERGES)))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        return "".join(f"{message.content}|\n" for message in messages)

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = {idx: piece for piece, idx in VOCABULARY.items()}
        return "".join(pieces[idx] for idx in token_ids)


class SplittingEngine(ScriptedEngine):
    """Samples `abc` in three tokens."""

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return Generation(
            token_ids=SAMPLED,
            logprobs=(-0.25,) * len(SAMPLED),
            versions=(0,) * len(SAMPLED),
            finish_reason="stop",
        )


async def three_turns(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["actor"].conversation()
    for prompt in ("ab?", "a", "b"):
        rewards.add(await chat.say(prompt), 1.0)
    return rewards


def make_renderer() -> ChatRenderer:
    return ChatRenderer(MergingTokenizer(), frozenset({STOP}))


def test_the_tokenizer_merges_what_was_sampled_apart() -> None:
    tokenizer = MergingTokenizer()
    assert tokenizer.decode(SAMPLED) == "abc|"
    assert tokenizer.encode("abc|") == [VOCABULARY["abc"], STOP]
    assert tokenizer.encode("b\na") == [VOCABULARY["b\n"], VOCABULARY["a"]]


async def test_each_turn_extends_the_very_tokens_that_were_sampled() -> None:
    engine = SplittingEngine()
    hosted = HostedPolicy(make_policy("actor"), engine, make_renderer())
    episode = await EpisodeRunner({"actor": hosted}, three_turns, exact).episode(make_task(), seed=1)
    first, second, third = (request.token_ids for request in engine.requests)
    assert second[: len(first) + len(SAMPLED)] == (*first, *SAMPLED)
    assert third[: len(second) + len(SAMPLED)] == (*second, *SAMPLED)
    (trajectory,) = episode.trajectories
    assert tuple(array(trajectory.token_ids, "int32").tolist()) == (*third, *SAMPLED)
    mask = array(trajectory.mask, "uint8").tolist()
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [
        (len(prompt), len(prompt) + len(SAMPLED)) for prompt in (first, second, third)
    ]
    assert sum(mask) == 3 * len(SAMPLED)


def test_what_follows_a_completion_is_encoded_by_itself() -> None:
    renderer = make_renderer()
    history = (Message(role="user", content="a"), Message(role="assistant", content="abc"))
    prefix = (*renderer.render(history[:1]), *SAMPLED)
    extended = renderer.extend(prefix, history, (Message(role="user", content="a"),))
    assert extended == (*prefix, VOCABULARY["\na"], STOP, VOCABULARY["\n"])
