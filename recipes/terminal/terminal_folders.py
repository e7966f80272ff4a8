"""The task folders of the world `terminal`: six kinds of commands, as Harbor's folders.

    python -m recipes.terminal.terminal_folders --out tasks --num 10

writes folders that Harbor, and the environment `astraflow.addons.envs.harbor:Harbor`, can play. The same seed
gives the same folders, byte for byte.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.sandbox.shell import BoxFile

__all__ = ["KINDS", "NAMES", "WORDS", "Errand", "folder_of", "make_errand", "write_folder"]

NAMES = (
    "acorn",
    "birch",
    "cedar",
    "daisy",
    "elm",
    "fern",
    "grape",
    "hazel",
    "iris",
    "kale",
    "lilac",
    "maple",
    "nettle",
    "olive",
    "poppy",
    "rose",
)
"""Names of files."""
WORDS = ("amber", "black", "blue", "gold", "green", "pink", "red", "white")
"""What the lines of files are made of."""
KINDS = {
    "rename": ("rename {source} to {target}.", "mv {source} {target}"),
    "count": ("count lines of {source} into {target}.", "wc -l < {source} > {target}"),
    "sort": ("sort {source} into {target}.", "sort {source} > {target}"),
    "first": ("first {num} lines of {source} into {target}.", "head -n {num} {source} > {target}"),
    "find": ("lines with {word} of {source} into {target}.", "grep {word} {source} > {target}"),
    "join": ("join {source} and {other} into {target}.", "cat {source} {other} > {target}"),
}
"""What is asked for, and a command that does it."""
MOST_FIRST = 3
_NUM_FILES = 3
_TASK = """\
schema_version = "1.4"

[task]
name = "astraflow/{name}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
"""
_DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files .\n"
_TEST = """\
# The reward is 1 if the files are what the task asks for, and no others.
mkdir -p /logs/verifier
if diff -r /tests/expected /app > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Errand:
    """What is to be done with some files.

    Example: `make_errand(random.Random(0)).text` is `sort elm into fern.` or something like it.
    """

    kind: str
    files: Mapping[str, Sequence[str]]
    """The lines of each file at the beginning."""
    source: str
    other: str
    """The second file of `join`, in each errand another one than `source`."""
    target: str
    """A name that no file has yet."""
    word: str
    num: int

    @property
    def text(self) -> str:
        """What the task asks for."""
        return self._filled(KINDS[self.kind][0])

    def command(self, *, is_careful: bool = True) -> str:
        """A command that does it. A careless one prints what should be in a file."""
        made = self._filled(KINDS[self.kind][1])
        return made if is_careful else made.partition(" > ")[0]

    def _filled(self, form: str) -> str:
        return form.format(
            source=self.source, other=self.other, target=self.target, word=self.word, num=self.num
        )

    def expected(self) -> dict[str, Sequence[str]]:
        """The lines of each file at the end."""
        lines = self.files[self.source]
        if self.kind == "rename":
            kept = {name: each for name, each in self.files.items() if name != self.source}
            return {**kept, self.target: lines}
        made = {
            "count": [str(len(lines))],
            "sort": sorted(lines),
            "first": lines[: self.num],
            "find": [line for line in lines if self.word in line],
            "join": [*lines, *self.files[self.other]],
        }
        return {**self.files, self.target: made[self.kind]}


def make_errand(rng: random.Random) -> Errand:
    """Draws an errand."""
    source, other, third, target = rng.sample(NAMES, _NUM_FILES + 1)
    files = {name: _lines(rng) for name in (source, other, third)}
    return Errand(
        kind=rng.choice(list(KINDS)),
        files=files,
        source=source,
        other=other,
        target=target,
        word=rng.choice(files[source]),
        num=rng.randint(1, MOST_FIRST),
    )


def _lines(rng: random.Random) -> list[str]:
    """Lines of a file: never sorted, and more than the first of them are ever asked for."""
    lines = rng.sample(WORDS, rng.randint(MOST_FIRST + 1, len(WORDS) - 1))
    return lines if lines != sorted(lines) else lines[::-1]


def folder_of(errand: Errand, name: str) -> dict[str, BoxFile]:
    """The task folder of an errand: its files by relative path."""
    texts = {
        "instruction.md": errand.text,
        "task.toml": _TASK.format(name=name),
        "environment/Dockerfile": _DOCKERFILE,
        "solution/solve.sh": f"{errand.command()}\n",
        "tests/test.sh": _TEST,
    }
    for file, lines in errand.files.items():
        texts[f"environment/files/{file}"] = _text(lines)
    for file, lines in errand.expected().items():
        texts[f"tests/expected/{file}"] = _text(lines)
    return {place: BoxFile(text.encode(), place.endswith(".sh")) for place, text in texts.items()}


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def write_folder(files: Mapping[str, BoxFile], folder: Path) -> None:
    """Writes a task folder."""
    for place, file in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(0o755 if file.is_executable else 0o644)


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the task folders")
    parser.add_argument("--num", type=int, default=10, help="number of tasks")
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    for idx in range(given.num):
        name = f"terminal-{idx}"
        errand = make_errand(random.Random(f"{given.seed}/{idx}"))
        write_folder(folder_of(errand, name), given.out / name)


if __name__ == "__main__":
    _main()
