"""Makes trajectories of texts that one can read, for tests of how episodes are shown."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from astraflow.types import MediaRef, Trajectory, Turn, VersionSpan
from astraflow.wire import column

Said = tuple[tuple[int, str], ...]
"""An answer: (version, text) for each stretch of it."""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, so that it encodes any text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: idx for idx, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    """The tokens of a text. A replacement character stands for half of a character."""
    first, *others = text.split("\ufffd")
    ids = list(TOKENIZER.encode(first, add_special_tokens=False).ids)
    for other in others:
        ids += TOKENIZER.encode("\u00e9", add_special_tokens=False).ids[:1]
        ids += TOKENIZER.encode(other, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def said(text: str, version: int = 1) -> Said:
    """An answer of one version."""
    return ((version, text),)


def talk(
    *parts: str | Said,
    policy: str = "actor",
    role: str = "",
    rewards: Sequence[float] = (),
    whole: float = 0.0,
    is_fork: bool = False,
    media: tuple[MediaRef, ...] = (),
) -> Trajectory:
    """A trajectory: texts that were given, and answers. `rewards`: those of its answers, in order."""
    ids: list[int] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    for part in parts:
        if isinstance(part, str):
            ids += ids_of(part)
            mask += [0] * (len(ids) - len(mask))
            continue
        start = len(ids)
        for version, text in part:
            new = ids_of(text)
            spans.append(VersionSpan(len(ids), len(new), version))
            ids += new
        mask += [1] * (len(ids) - len(mask))
        reward = rewards[len(turns)] if len(turns) < len(rewards) else 0.0
        turns.append(Turn(start=start, end=len(ids), reward=reward))
    return Trajectory(
        policy=policy,
        role=role or policy,
        token_ids=column(ids, "int32"),
        mask=bytes(mask),
        behavior_logprobs=column([-0.5 * each for each in mask], "float32"),
        versions=tuple(spans),
        temperature=1.0,
        finish_reason="stop",
        turns=tuple(turns),
        reward=whole + sum(turn.reward for turn in turns),
        is_fork=is_fork,
        media=media,
    )


def save_tokenizer(run_dir: Path, model_dir: Path, *policies: str) -> None:
    """Gives a run folder a recipe whose policies have the tokenizer of these texts."""
    model_dir.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(model_dir / "tokenizer.json"))
    lines = [
        "name: talk",
        "tasks:",
        "  sources: {sums: {name: reasoning_gym, dataset: basic_arithmetic, size: 20}}",
        "  reward: {name: exact}",
        "policies:",
        *[f"  {policy}: {{model: {model_dir}, train: {{steps: 1}}}}" for policy in policies],
    ]
    (run_dir / "recipe.yaml").write_text("\n".join(lines))
