"""The GPUs for which a recipe is rehearsed: memory, bandwidth, and speed, from the makers' data sheets."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.user_input.mistakes import hint
from astraflow.user_input.yaml_files import parts_of

__all__ = ["CARDS", "USABLE_FRAC", "Card", "card_of", "head_comment", "read_gpus", "stated"]

USABLE_FRAC = 0.93
"""Share of a card's memory for tensors; the rest is for CUDA's context, NCCL, and fragments (assumed)."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. Example: `Card(80, 3.35e12, 989e12)` is an H100."""

    gb: int
    """Memory in 10^9 bytes."""
    bytes_per_s: float
    flop_per_s: float
    """In bfloat16, of dense matrices."""


CARDS = {
    "A100-40GB": Card(40, 1.56e12, 312e12),
    "A100-80GB": Card(80, 2.04e12, 312e12),
    "H100-80GB": Card(80, 3.35e12, 989e12),
    "H20-96GB": Card(96, 4.0e12, 148e12),
    "H200-141GB": Card(141, 4.8e12, 989e12),
    "B200-180GB": Card(180, 7.7e12, 2250e12),
    "L40S-48GB": Card(48, 0.86e12, 362e12),
}
"""Only H100 and H200 were compared with a source; the others are from memory."""


def read_gpus(text: str) -> tuple[int, str]:
    """`8xH100-80GB` -> (8, "H100-80GB"). Raises: ConfigError for anything else, with the known cards."""
    num, name = found.groups() if (found := re.fullmatch(r"(\d+)x(.+)", text)) else ("1", text)
    known = {card.lower(): card for card in CARDS}
    if name.lower() not in known or int(num) < 1:
        raise ConfigError(
            f"--gpus = {text!r}: expected a number and a card, e.g. 8xH100-80GB{hint(name, list(CARDS))}"
        )
    return int(num), known[name.lower()]


def card_of(file: Path) -> str:
    """The card for a recipe whose first comment may say how much memory its GPUs have."""
    gb = int(stated(file, r"GPUs? of (\d+) GB") or 0)
    return "H200-141GB" if gb > CARDS["H100-80GB"].gb else "H100-80GB"


def stated(file: Path, pattern: str) -> str:
    """The first match in the comments at the top of a recipe's files, those of its size first, or nothing."""
    for path in reversed(_files(file)):
        if found := re.search(pattern, " ".join(head_comment(path))):
            return found[1]
    return ""


def head_comment(path: Path) -> list[str]:
    """The lines of the comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    num = next((idx for idx, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").strip() for line in lines[:num]]


def _files(path: Path) -> list[Path]:
    _, parts = parts_of(path)
    bases = [] if parts else re.findall(r"[\w./-]+\.yaml", next(_extends(path), ""))
    found = [file for base in bases for file in _files((path.parent / base).resolve())]
    return [*reversed(parts), *found, path][: None if not parts else -1]


def _extends(path: Path) -> Iterator[str]:
    yield from re.findall(r"^extends:\s(.+)$", path.read_text(encoding="utf-8"), re.M)
