"""The world `terminal`: commands of a shell that rename, count, sort, cut, search and join files.

Each task is a task folder of Harbor, played in the sandbox as any other one is. `terminal_folders.py` draws
them; the same arguments give the same tasks, byte for byte.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Literal

from recipes.terminal.terminal_folders import KINDS, MOST_FIRST, Errand, folder_of, make_errand

from astraflow.addons.envs.harbor import Boxes, HarborEnvironment
from astraflow.addons.envs.harbor_folder import HarborTask, harbor_task
from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.errors import ConfigError
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Terminal", "demonstrations", "expert", "random_player"]


class Terminal(HarborEnvironment):
    """Tasks of the splits `train` and `heldout`; the reward is 1 if the files are as asked for, else 0."""

    def __init__(
        self,
        *,
        form: Literal["full", "bare"] = "full",
        max_commands: int = 1,
        command_s: float = 5.0,
        size: int = 3_000,
        num_errands: int = 0,
        heldout_frac: float = 0.2,
        seed: int | str = 0,
        num_boxes: int = 2,
        backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
    ) -> None:
        """`size`: number of tasks of a split. `num_errands`: how many of them differ; 0: each is drawn anew.
        For the others see `astraflow.addons.envs.harbor`.

        Raises: ConfigError.
        """
        super().__init__(
            Boxes(num_boxes=num_boxes, backend=backend),
            form=form,
            max_commands=max_commands,
            command_s=command_s,
        )
        if size < 1 or num_errands < 0:
            raise ConfigError(f"size = {size}, num_errands = {num_errands}: at least 1 and 0 are needed")
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._size = size
        self._num_errands = num_errands or size
        self._heldout_frac = heldout_frac
        self._seed = seed

    def errand(self, split: str, idx: int) -> Errand:
        """What a task asks for."""
        rng = random.Random(f"{self._seed}/{split}/{idx % self._num_errands}")
        while True:
            errand = make_errand(rng)
            if is_heldout(errand.text, frac=self._heldout_frac) is (split == "heldout"):
                return errand

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [
            Task(id=str(idx), source=split, prompt=self.errand(split, idx).text, spec=f"{split}/{idx}")
            for idx in range(self._size)
        ]

    def harbor_task(self, task: Task) -> HarborTask:
        split, _, idx = task.spec.partition("/")
        errand = self.errand(split, int(idx))
        if errand.text != task.prompt:
            raise ConfigError(f"task {task.id} asks for {task.prompt!r}, and here for {errand.text!r}")
        name = f"terminal-{split}-{idx}"
        return harbor_task(folder_of(errand, name), name)


# --- players --------------------------------------------------------------------------------------


def expert(errand: Errand) -> Iterator[str]:
    """The command that does what is asked for."""
    while True:
        yield errand.command()


def random_player(errand: Errand, rng: random.Random) -> Iterator[str]:
    """Any command of the world with any of the task's files and words."""
    names = [*errand.files, errand.target]
    while True:
        _, form = KINDS[rng.choice(list(KINDS))]
        source, other, target = rng.sample(names, 3)
        yield form.format(
            source=source, other=other, target=target, word=errand.word, num=rng.randint(1, MOST_FIRST)
        )


# --- warm start -----------------------------------------------------------------------------------


def demonstrations(
    num: int, seed: int, careful_frac: tuple[float, float] = (0.7, 0.1), heldout_frac: float = 0.2
) -> Sequence[Demonstration]:
    """Errands and commands; careless ones print what should be in a file. No errand is held out.

    `careful_frac`: share of careful commands, at the first and at the last demonstration; linear in between.
    """
    rng = random.Random(f"demonstrations {seed}")
    first, last = careful_frac
    shown = list[Demonstration]()
    while len(shown) < num:
        errand = make_errand(rng)
        if is_heldout(errand.text, frac=heldout_frac):
            continue
        is_careful = rng.random() < first + (last - first) * len(shown) / num
        shown.append(Demonstration(errand.text, errand.command(is_careful=is_careful)))
    return shown
