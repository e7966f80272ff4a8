"""Task folders of Harbor as an environment, each command of the policy run in the sandbox.

    tasks:
      environments:
        shell:
          use: "astraflow.addons.envs.harbor:Harbor"
          args: {path: my-tasks, max_commands: 16}
      sources: {tasks: {name: environment}}
    workflow: {name: environment, max_turns: 17}

An episode begins with the files of the task's image. Each reply is a command, whose files the next one finds
again. At the end, `/tests` is put into the box, `test.sh` is run, and the reward is read from
`/logs/verifier/reward.txt` or `reward.json`. A reward file that is missing, empty or no
number fails the episode, and is never a reward of 0; so do tests that take too long.

Source: https://harborframework.com/docs/tasks.
"""

import asyncio
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from astraflow.addons.envs.harbor_folder import HarborTask, harbor_task, read_folder
from astraflow.addons.envs.task_servers import MAX_QUOTED, is_reward
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.shell import (
    CommandResult,
    Ran,
    ShellCommand,
    ShellLimits,
    archive,
    run_commands,
    shell_sandbox,
)
from astraflow.errors import ConfigError, RolloutError, SandboxError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Harbor", "HarborEnvironment", "HarborEpisode"]

_MIB = 1 << 20
_LOGS = "/logs/verifier"
_REWARD_TEXT = f"{_LOGS}/reward.txt"
_REWARD_JSON = f"{_LOGS}/reward.json"
_MAX_SHOWN = 8_000
"""Characters of a command's outputs that a policy is shown."""
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colors of terminals, and characters that no text for a model holds."""
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
    """An episode: the files so far, and what is left to the agent."""

    task: HarborTask
    state: bytes
    left_s: float
    num_commands: int = 0


class HarborEnvironment(InteractiveEnvironment):
    """Plays task folders of Harbor; the reward is that of their tests. A subclass names the tasks."""

    def __init__(
        self,
        *,
        form: Literal["full", "bare"] = "full",
        max_commands: int = 16,
        command_s: float = 20.0,
        reward: str = "reward",
        disk_mb: int = 64,
        num_boxes: int = 2,
        backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
    ) -> None:
        """`form`: `full` explains and takes blocks of code, and a reply without one ends the episode; `bare`
        shows the instruction alone and takes the whole reply. `max_commands`: after so many, the tests are
        run. `command_s`: seconds of one command. `reward`: the key in reward.json, unless it has only one.
        `disk_mb`: largest size of all files of an episode, in MiB. `num_boxes`: commands that run at a time.

        Raises: ConfigError.
        """
        if max_commands < 1 or not 0 < command_s <= 600 or disk_mb < 1:
            raise ConfigError(
                f"max_commands = {max_commands}, command_s = {command_s}, disk_mb = {disk_mb}: at least 1, "
                "more than 0 (at most 600) and at least 1 are needed"
            )
        self._is_full = form == "full"
        self._max_commands = max_commands
        self._command_s = command_s
        self._reward = reward
        self._disk_mb = disk_mb
        self._sandbox = shell_sandbox(SandboxConfig(num_boxes=num_boxes, backend=backend))

    def harbor_task(self, task: Task) -> HarborTask:
        """The task as the sandbox plays it. Raises: ConfigError."""
        raise NotImplementedError

    # --- episodes -----------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._sandbox.open()

    async def close(self) -> None:
        await self._sandbox.close()

    async def reset(self, task: Task, seed: int) -> tuple[HarborEpisode, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            made = await asyncio.to_thread(self.harbor_task, task)
        except (ConfigError, OSError) as err:
            raise RolloutError(f"task {task.id} cannot be played: {err}", is_retryable=False) from err
        state = archive(made.files, [made.folder])
        shown = made.instruction
        if self._is_full:
            shown = _INSTRUCTION.format(folder=made.folder, num=self._max_commands, instruction=shown)
        return HarborEpisode(made, state, made.agent_s or math.inf), Observation(shown)

    async def step(self, state: HarborEpisode, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        command = reply
        if self._is_full:
            blocks = _FENCE.findall(reply)
            if not blocks:
                return await self._tested(state)
            command = "\n".join(blocks)
        state.num_commands += 1
        ours = ShellCommand(
            command, state.task.folder, state.task.env, min(self._command_s, max(state.left_s, 0.1))
        )
        if state.num_commands == self._max_commands:
            return await self._tested(state, ours)
        started_s = asyncio.get_running_loop().time()
        ran = await self._run(state, [ours], is_kept=True)
        state.left_s -= asyncio.get_running_loop().time() - started_s
        told = _shown(ran.ended[0])
        if ran.problem:
            told += f"\nThe files that it left are dropped: {ran.problem}"
        else:
            state.state = ran.state
        return await self._tested(state) if state.left_s <= 0 else Observation(told)

    async def solve(self, task: Task, *, is_solved: bool = True) -> float:
        """The reward of the task's own solution, or of nothing done at all; for whoever writes tasks.

        Raises: RolloutError as an episode would; ConfigError if the task has no solution.
        """
        episode, _ = await self.reset(task, 0)
        made = episode.task
        if not is_solved:
            return (await self._tested(episode)).reward
        if "/solution/solve.sh" not in made.solution:
            raise ConfigError(f"task {task.id} has no solution/solve.sh")
        solution = ShellCommand(
            "bash /solution/solve.sh",
            made.folder,
            {**made.env, **made.solution_env},
            made.agent_s or self._command_s,
            files=archive(made.solution),
            cleared=["/solution"],
        )
        return (await self._tested(episode, solution)).reward

    async def _tested(self, state: HarborEpisode, *last: ShellCommand) -> Observation:
        """Runs the tests, after a last command if there is one. Raises: RolloutError without a reward."""
        made = state.task
        # What the agent made of its folder must not keep the tests from being run.
        tests = ShellCommand(
            f"cd {shlex.quote(made.folder)}; bash /tests/test.sh",
            "/tests",
            {**made.env, **made.verifier_env},
            made.verifier_s,
            files=archive(made.tests),
            cleared=["/tests", _LOGS],
            reads=[_REWARD_TEXT, _REWARD_JSON],
        )
        ended = (await self._run(state, [*last, tests], is_kept=False)).ended[-1]
        reward = self._reward_of(ended, made)
        return Observation(reward=reward, is_done=True)

    async def _run(self, state: HarborEpisode, commands: Sequence[ShellCommand], *, is_kept: bool) -> Ran:
        made = state.task
        limits = ShellLimits(
            memory_bytes=made.memory_mb * _MIB,
            disk_bytes=min(made.storage_mb, self._disk_mb) * _MIB,
        )
        try:
            return await run_commands(self._sandbox, state.state, commands, limits=limits, is_kept=is_kept)
        except SandboxError as err:
            raise RolloutError(f"{made.name}: {err}") from err

    def _reward_of(self, ended: CommandResult, made: HarborTask) -> float:
        """What the tests wrote. Raises: RolloutError if it is no reward."""
        where = f"{made.name}: its tests"
        if ended.is_late:
            raise RolloutError(f"{where} did not end within {made.verifier_s:g} s")
        text = ended.found[_REWARD_TEXT]
        scores = ended.found[_REWARD_JSON]
        if text is None and scores is None:
            said = (ended.stdout[-MAX_QUOTED:] + ended.stderr[-MAX_QUOTED:]).decode(errors="replace")
            raise RolloutError(
                f"{where} (exit code {ended.code}) wrote neither {_REWARD_TEXT} nor {_REWARD_JSON}: {said!r}"
            )
        raw = text if text is not None else scores or b""
        try:
            value: Any = float(raw) if text is not None else self._score_in(json.loads(raw))
        except (ValueError, RecursionError) as err:
            raise RolloutError(f"{where} wrote no reward but {raw[:MAX_QUOTED]!r}: {err}") from err
        if not is_reward(value):
            raise RolloutError(f"{where} wrote no reward but {raw[:MAX_QUOTED]!r}")
        return float(value)

    def _score_in(self, scores: Any) -> Any:
        """The reward among several scores. Raises: ValueError."""
        if not isinstance(scores, dict) or not scores:
            raise ValueError("expected an object with numbers")
        found = cast("Mapping[str, Any]", scores)
        if self._reward not in found and len(found) > 1:
            raise ValueError(f"it has no {self._reward!r} (it has: {', '.join(found)}); name one by `reward`")
        return found.get(self._reward, next(iter(found.values())))


class Harbor(HarborEnvironment):
    """The task folders in a folder, in the splits `train` and `heldout`.

    Example: `Harbor(path="my-tasks")`.
    """

    def __init__(
        self,
        *,
        path: str,
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
        """`path`: of the folder that holds task folders. `heldout_frac`: share of the tasks held out.
        `without_network`: whether tasks that may use the network are played without it, or refused. For the
        others see `HarborEnvironment`.

        Raises: ConfigError.
        """
        super().__init__(
            form=form,
            max_commands=max_commands,
            command_s=command_s,
            reward=reward,
            disk_mb=disk_mb,
            num_boxes=num_boxes,
            backend=backend,
        )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._path = Path(path)
        self._heldout_frac = heldout_frac
        self._without_network = without_network

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        folders = sorted(each.parent for each in self._path.glob("*/task.toml"))
        if not folders:
            raise ConfigError(
                f"{self._path.resolve()} holds no task folders of Harbor, with a task.toml each"
            )
        return [
            Task(id=folder.name, source=split, prompt=self._read(folder).instruction, spec=folder.name)
            for folder in folders
            if is_heldout(folder.name, frac=self._heldout_frac) is (split == "heldout")
        ]

    def harbor_task(self, task: Task) -> HarborTask:
        if Path(task.spec).name != task.spec or task.spec in {"", ".", ".."}:
            raise ConfigError(f"task {task.id}: {task.spec!r} is no name of a folder in {self._path}")
        return self._read(self._path / task.spec)

    def _read(self, folder: Path) -> HarborTask:
        return harbor_task(read_folder(folder), str(folder), without_network=self._without_network)


def _shown(ended: CommandResult) -> str:
    """What the policy is told of a command."""
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    text = _CONTROLS.sub("", said.replace("\r\n", "\n"))
    if len(text) > _MAX_SHOWN:
        half = _MAX_SHOWN // 2
        text = f"{text[:half]}\n[{len(text) - _MAX_SHOWN} characters left out]\n{text[-half:]}"
    if ended.is_late:
        return f"{text}\n[ended: its time was over]"
    return text if ended.code == 0 else f"{text}\n[exit code {ended.code}]"
