"""Harbor task folders as an environment. The policy's commands run in the sandbox, or in containers.

    tasks:
      environments:
        shell:
          use: "astraflow.addons.envs.harbor:Harbor"
          args: {path: my-tasks, where: podman, max_commands: 16}
      sources: {tasks: {name: environment}}
    workflow: {name: environment, max_turns: 17}

An episode begins with the files of the task's image. Each reply is a command. The files that it leaves are
there for the next command. At the end, `/tests` is put into the box or container, `test.sh` is run, and the
reward is read from `/logs/verifier/reward.txt` or `reward.json`. If that file is missing, empty, or not a
number, or if the tests take too long, the episode fails. It never gets a reward of 0 for that.

Source: https://harborframework.com/docs/tasks.
"""

import asyncio
import json
import logging
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from astraflow.addons.envs.harbor_container import Containers
from astraflow.addons.envs.harbor_folder import HarborTask, harbor_task, read_folder
from astraflow.addons.envs.task_servers import MAX_QUOTED, is_reward
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.fences import fenced_blocks
from astraflow.addons.sandbox.shell import (
    CommandResult,
    ShellCommand,
    ShellLimits,
    ShellRun,
    archive,
    run_commands,
    shell_sandbox,
)
from astraflow.errors import ConfigError, RolloutError, SandboxError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Boxes", "Harbor", "HarborEnvironment", "HarborEpisode", "commands_of"]

_log = logging.getLogger(__name__)

_MIB = 1 << 20
_LOGS = "/logs/verifier"
_REWARD_TEXT = f"{_LOGS}/reward.txt"
_REWARD_JSON = f"{_LOGS}/reward.json"
_MAX_SHOWN = 8_000
"""Largest number of characters of a command's output that the policy sees."""
_SHELLS = ("bash", "sh", "shell", "zsh", "console", "terminal")
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Terminal colors, and control characters that text for a model must not have."""
_INSTRUCTION = """\
Solve a task by commands of a shell. Each reply holds one block of commands:

```bash
ls
```

They are run in {folder}, and you are shown what they print. Files stay; processes and variables end with \
their command. A reply without a block says that you are done. You have {num} commands.

The task:
{instruction}"""


@dataclass
class HarborEpisode:
    """An episode: where it is, and how much time and how many commands the agent has used."""

    task: HarborTask
    state: bytes
    """Its files so far; in a container, the container's name."""
    left_s: float
    num_commands: int = 0


class Boxes:
    """Runs the commands of each episode in the sandbox. The state of an episode is its files."""

    def __init__(
        self,
        *,
        disk_mb: int = 64,
        num_boxes: int = 2,
        backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
    ) -> None:
        """`disk_mb`: largest size of all files of an episode, in MiB. `num_boxes`: number of commands that
        run at a time.

        Raises: ConfigError.
        """
        if disk_mb < 1:
            raise ConfigError(f"disk_mb = {disk_mb}: at least 1 is needed")
        self._disk_mb = disk_mb
        self._sandbox = shell_sandbox(SandboxConfig(num_boxes=num_boxes, backend=backend))

    async def open(self) -> None:
        """Starts the sandbox. Raises: ConfigError."""
        await self._sandbox.open()

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()

    async def begin(self, task: HarborTask) -> bytes:
        """Returns the files of the task's image."""
        return archive(task.files, [task.folder])

    async def end(self, state: bytes) -> None:
        """Does nothing, because no process is left after a command."""

    async def run(
        self, task: HarborTask, state: bytes, commands: Sequence[ShellCommand], *, is_kept: bool
    ) -> ShellRun:
        """Runs commands. Raises: RolloutError."""
        limits = ShellLimits(
            memory_bytes=task.memory_mb * _MIB,
            disk_bytes=min(task.storage_mb, self._disk_mb) * _MIB,
        )
        try:
            return await run_commands(self._sandbox, state, commands, limits=limits, is_kept=is_kept)
        except SandboxError as err:
            raise RolloutError(f"{task.name}: {err}") from err


class HarborEnvironment(InteractiveEnvironment):
    """Runs Harbor task folders. The tests determine the reward. A subclass lists the tasks."""

    def __init__(
        self,
        place: Boxes | Containers,
        *,
        form: Literal["full", "bare"] = "full",
        max_commands: int = 16,
        command_s: float = 20.0,
        reward: str = "reward",
    ) -> None:
        """`place`: where commands run. `form`: `full` explains the rules and runs the reply's code blocks,
        and a reply without one ends the episode; `bare` shows only the instruction and runs the whole reply.
        `max_commands`: number of commands before the tests run. `command_s`: time limit of one command.
        `reward`: the key in reward.json, unless it has only one.

        Raises: ConfigError.
        """
        if max_commands < 1 or not 0 < command_s <= 600:
            raise ConfigError(
                f"max_commands = {max_commands}, command_s = {command_s}: at least 1, and more than 0 (at "
                "most 600) are needed"
            )
        self._place = place
        self._is_full = form == "full"
        self._max_commands = max_commands
        self._command_s = command_s
        self._reward = reward

    def harbor_task(self, task: Task) -> HarborTask:
        """The task in the form that is run. Raises: ConfigError."""
        raise NotImplementedError

    # --- episodes -----------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._place.open()

    async def close(self) -> None:
        await self._place.close()

    async def reset(self, task: Task, seed: int) -> tuple[HarborEpisode, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            trial = await asyncio.to_thread(self.harbor_task, task)
        except (ConfigError, OSError) as err:
            raise RolloutError(f"task {task.id} cannot be played: {err}", is_retryable=False) from err
        text = trial.instruction
        if self._is_full:
            text = _INSTRUCTION.format(folder=trial.folder, num=self._max_commands, instruction=text)
        state = await self._place.begin(trial)
        return HarborEpisode(trial, state, trial.agent_s or math.inf), Observation(text)

    async def end(self, state: HarborEpisode) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await self._place.end(state.state)

    async def step(self, state: HarborEpisode, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        command = reply
        if self._is_full:
            command = commands_of(reply)
            if not command:
                return await self._run_tests(state)
        state.num_commands += 1
        ours = ShellCommand(
            command, state.task.folder, state.task.env, min(self._command_s, max(state.left_s, 0.1))
        )
        if state.num_commands == self._max_commands:
            return await self._run_tests(state, ours)
        started_s = asyncio.get_running_loop().time()
        ran = await self._place.run(state.task, state.state, [ours], is_kept=True)
        state.left_s -= asyncio.get_running_loop().time() - started_s
        text = _format_result(ran.results[0])
        if ran.problem:
            text += f"\nThe files that it left are dropped: {ran.problem}"
        else:
            state.state = ran.state
        return await self._run_tests(state) if state.left_s <= 0 else Observation(text)

    async def solve(self, task: Task, *, is_solved: bool = True) -> float:
        """The reward of the task's own solution, or of doing nothing. It is meant for authors of tasks.

        Raises: RolloutError, like an episode; ConfigError if the task has no solution.
        """
        episode, _ = await self.reset(task, 0)
        trial = episode.task
        if not is_solved:
            return (await self._run_tests(episode)).reward
        if "/solution/solve.sh" not in trial.solution:
            raise ConfigError(f"task {task.id} has no solution/solve.sh")
        solution = ShellCommand(
            "bash /solution/solve.sh",
            trial.folder,
            {**trial.env, **trial.solution_env},
            trial.agent_s or self._command_s,
            files=archive(trial.solution),
            cleared=["/solution"],
        )
        return (await self._run_tests(episode, solution)).reward

    async def _run_tests(self, state: HarborEpisode, *last: ShellCommand) -> Observation:
        """Runs the tests, after a last command if given. Raises: RolloutError if they write no reward."""
        trial = state.task
        # The command runs in /tests, because the agent may have made its own folder unusable.
        tests = ShellCommand(
            f"cd {shlex.quote(trial.folder)}; bash /tests/test.sh",
            "/tests",
            {**trial.env, **trial.verifier_env},
            trial.verifier_s,
            files=archive(trial.tests),
            cleared=["/tests", _LOGS],
            reads=[_REWARD_TEXT, _REWARD_JSON],
        )
        ran = await self._place.run(trial, state.state, [*last, tests], is_kept=False)
        return Observation(reward=self._read_reward(ran.results[-1], trial), is_done=True)

    def _read_reward(self, result: CommandResult, trial: HarborTask) -> float:
        """Reads the reward that the tests wrote. Raises: RolloutError if there is none."""
        where = f"{trial.name}: its tests"
        if result.is_late:
            raise RolloutError(f"{where} did not end within {trial.verifier_s:g} s")
        text = result.found[_REWARD_TEXT]
        scores = result.found[_REWARD_JSON]
        if text is None and scores is None:
            output = (result.stdout[-MAX_QUOTED:] + result.stderr[-MAX_QUOTED:]).decode(errors="replace")
            raise RolloutError(
                f"{where} (exit code {result.code}) wrote neither {_REWARD_TEXT} nor {_REWARD_JSON}: "
                f"{output!r}"
            )
        raw = text if text is not None else scores or b""
        try:
            value: Any = float(raw) if text is not None else self._score_in(json.loads(raw))
        except (ValueError, RecursionError) as err:
            raise RolloutError(f"{where} wrote an invalid reward: {raw[:MAX_QUOTED]!r}: {err}") from err
        if not is_reward(value):
            raise RolloutError(f"{where} wrote an invalid reward: {raw[:MAX_QUOTED]!r}")
        return float(value)

    def _score_in(self, scores: Any) -> Any:
        """Selects the reward among several scores. Raises: ValueError."""
        if not isinstance(scores, dict) or not scores:
            raise ValueError("expected an object with numbers")
        by_name = cast("Mapping[str, Any]", scores)
        if self._reward not in by_name and len(by_name) > 1:
            raise ValueError(
                f"it has no {self._reward!r} (it has: {', '.join(by_name)}); set `reward` to one"
            )
        return by_name.get(self._reward, next(iter(by_name.values())))


class Harbor(HarborEnvironment):
    """All Harbor task folders in a folder, in the splits `train` and `heldout`.

    Example: `Harbor(path="my-tasks")`.
    """

    def __init__(
        self,
        *,
        path: str,
        where: str = "sandbox",
        form: Literal["full", "bare"] = "full",
        max_commands: int = 16,
        command_s: float = 20.0,
        reward: str = "reward",
        heldout_frac: float = 0.2,
        without_network: bool = False,
        disk_mb: int = 64,
        num_boxes: int = 2,
        backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
    ) -> None:
        """`path`: the folder with the task folders. `where`: `sandbox`, or the program that runs containers:
        `podman`, or one with the same commands. The sandbox refuses tasks that need more; with containers,
        they are left out with a warning. `heldout_frac`: share of the tasks held out.

        In the sandbox only: `without_network`: whether tasks that may use the network run without it, or are
        refused. `disk_mb`, `num_boxes`, `backend`: see `Boxes`. For the others, see `HarborEnvironment`.

        Raises: ConfigError.
        """
        self._in_container = where != "sandbox"
        super().__init__(
            Containers(where)
            if self._in_container
            else Boxes(disk_mb=disk_mb, num_boxes=num_boxes, backend=backend),
            form=form,
            max_commands=max_commands,
            command_s=command_s,
            reward=reward,
        )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._path = Path(path)
        self._where = where
        self._heldout_frac = heldout_frac
        self._without_network = without_network

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        if self._in_container and shutil.which(self._where) is None:
            raise ConfigError(
                f"the tasks in {self._path} run in containers, but the program {self._where!r} is not "
                "installed here; install podman (on Debian: apt-get install podman)"
            )
        folders = sorted(each.parent for each in self._path.glob("*/task.toml"))
        if not folders:
            raise ConfigError(f"{self._path.resolve()} has no Harbor task folders; each needs a task.toml")
        return [
            Task(id=folder.name, source=split, prompt=trial.instruction, spec=folder.name)
            for folder in folders
            if is_heldout(folder.name, frac=self._heldout_frac) is (split == "heldout")
            and (trial := self._read_listed(folder))
        ]

    def _read_listed(self, folder: Path) -> HarborTask | None:
        """Reads a folder; None if it needs more than a container. Raises: ConfigError in the sandbox."""
        try:
            return self._read(folder)
        except ConfigError as err:
            if not self._in_container:
                raise
            _log.warning("the task %s is left out: %s", folder.name, err)
            return None

    def harbor_task(self, task: Task) -> HarborTask:
        if Path(task.spec).name != task.spec or task.spec in {"", ".", ".."}:
            raise ConfigError(f"task {task.id}: {task.spec!r} is not the name of a folder in {self._path}")
        return self._read(self._path / task.spec)

    def _read(self, folder: Path) -> HarborTask:
        return harbor_task(
            read_folder(folder, in_container=self._in_container),
            str(folder),
            without_network=self._without_network,
            in_container=self._in_container,
        )


def commands_of(reply: str) -> str:
    """The commands in a reply: its blocks of shell, or else those whose fence names no language, or else all
    blocks. Empty if it has no block."""
    blocks = fenced_blocks(reply)
    named = [block for block in blocks if block.tag in _SHELLS]
    unnamed = [block for block in blocks if not block.tag]
    return "\n".join(block.text for block in named or unnamed or blocks)


def _format_result(result: CommandResult) -> str:
    """Formats the result of a command for the policy."""
    output = (result.stdout + result.stderr).decode(errors="replace")
    text = _CONTROLS.sub("", output.replace("\r\n", "\n"))
    if len(text) > _MAX_SHOWN:
        half = _MAX_SHOWN // 2
        text = f"{text[:half]}\n[{len(text) - _MAX_SHOWN} characters left out]\n{text[-half:]}"
    if result.is_late:
        return f"{text}\n[ended: its time was over]"
    return text if result.code == 0 else f"{text}\n[exit code {result.code}]"
