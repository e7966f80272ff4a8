"""Makes and scores tasks of the `reasoning-gym` library.

A task specifies how it was generated. The scorer generates the same entry again, so each data set's own
scorer gets exactly the objects that the data set made. If the entry differs from the task, for example
because another machine has another version of the library, that is an error, never a score of 0. A scorer
that would run a completion as Python runs in a sandbox (`scorer.py`), unless the recipe allows it to run
outside.
"""

import importlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.addons.reasoning_gym.one_data_set import import_data_set
from astraflow.config import check_args
from astraflow.errors import ConfigError, DataError
from astraflow.tasks.rows import system_context
from astraflow.types import Task
from astraflow.user_input.extras import install_command
from astraflow.user_input.mistakes import hint
from astraflow.user_input.splits import is_heldout

__all__ = [
    "GYM",
    "HARMLESS_SCORERS",
    "GymSource",
    "check_entry",
    "load_data_set",
    "load_gym",
    "runs_answers",
    "score_gym",
]

GYM = "reasoning_gym"
"""Value of `kind` in the spec of this source's tasks."""

_CACHED_TASKS = 4096
"""Number of cached tasks. All episodes of a group request the same task."""
_MAX_TRIES = 1000
"""Maximum number of entries tried to find one task on its side of the split. At a share of 0.1, all of them
fail with probability 10^-45."""


class _Dataset(Protocol):
    """The part of a reasoning-gym data set that this module uses."""

    def __getitem__(self, idx: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class GymSource:
    """A source of generated tasks. Each task is generated when it is requested.

    Example: `GymSource(ReasoningGymConfig(dataset="basic_arithmetic", split="train"), name="sums").task(0)`.

    On one side of a split, task `i` is the first of the entries `i`, `i + size`, `i + 2 * size`, ... whose
    prompt is on that side. No task therefore depends on the tasks before it.
    """

    def __init__(self, config: ReasoningGymConfig, *, name: str) -> None:
        _, config_type = load_data_set(config.dataset)
        own = sorted({"seed", "size"} & set(config.args))
        if own:
            raise ConfigError(f"args.{own[0]}: set `{own[0]}` of the source instead")
        check_args(config_type, config.args, where="args")
        self._config = config
        self._name = name
        self._recipe = {
            "kind": GYM,
            "dataset": config.dataset,
            "seed": config.seed,
            "size": config.size if config.split == "all" else config.size * _MAX_TRIES,
            "args": config.args,
        }
        self._dataset = _open(json.dumps(self._recipe))
        self._made = lru_cache(_CACHED_TASKS)(self._make)
        self.task(0)  # checks early that the arguments work and that this side of the split has tasks

    def __len__(self) -> int:
        return self._config.size

    def task(self, idx: int) -> Task:
        """Returns task number `idx`, counted from 0.

        Raises: DataError if the source's side of the split doesn't seem to have tasks.
        """
        if not 0 <= idx < len(self):
            raise IndexError(idx)
        return self._made(idx)

    def _make(self, idx: int) -> Task:
        config = self._config
        entry_idx, entry = self._entry(idx)
        prefix = f"{self._name}/" if self._name else ""
        return Task(
            id=f"{prefix}{config.dataset}-{config.seed}-{entry_idx}",
            source=self._name,
            prompt=str(entry["question"]),
            answer="" if entry["answer"] is None else str(entry["answer"]),
            context=system_context(config.system),
            spec=json.dumps({**self._recipe, "idx": entry_idx}),
        )

    def _entry(self, idx: int) -> tuple[int, dict[str, Any]]:
        """Returns the number of a task's entry, and the entry."""
        config = self._config
        for entry_idx in range(idx, config.size * _MAX_TRIES, config.size):
            entry = self._dataset[entry_idx]
            is_held = is_heldout(str(entry["question"]), frac=config.heldout_frac)
            if config.split == "all" or is_held == (config.split == "heldout"):
                return entry_idx, entry
        raise DataError(
            f"data set {config.dataset}: none of {_MAX_TRIES} prompts is on the side {config.split!r} "
            f"(heldout_frac {config.heldout_frac}); its problem space is too small for a split, so give it "
            "more freedom in `args`"
        )


def runs_answers(dataset: str, allowed: Collection[str]) -> bool:
    """Checks whether a data set's scorer has to run in a sandbox.

    That is the case if it runs answers as Python or isn't known to be harmless, and isn't `allowed` to run
    outside.
    """
    return dataset not in HARMLESS_SCORERS and dataset not in allowed


def score_gym(task: Task, text: str, spec: Mapping[str, Any]) -> float:
    """Scores an answer with the library's own scorer, in this process.

    Raises: DataError if this machine generates another task.
    """
    recipe = json.dumps({key: value for key, value in spec.items() if key != "idx"})
    entry = _cached_entry(recipe, int(spec["idx"]))
    check_entry(task, str(entry["question"]))
    return float(_open(recipe).score_answer(text, entry))


def check_entry(task: Task, question: str) -> None:
    """Checks that this machine generates the same task as the one that is scored. Raises: DataError."""
    if question != task.prompt:
        raise DataError(
            f"task {task.id}: this machine generates another prompt ({question[:60]!r}); install the same "
            "version of reasoning-gym on all machines"
        )


@lru_cache(maxsize=256)
def _cached_entry(recipe: str, idx: int) -> dict[str, Any]:
    """Returns an entry of a data set. It is cached because all episodes of a group score the same entry."""
    return _open(recipe)[idx]


@lru_cache(maxsize=32)
def _open(recipe: str) -> _Dataset:
    """Opens a data set from its JSON description.

    Raises: ConfigError if the library refuses the arguments.
    """
    described: dict[str, Any] = json.loads(recipe)
    dataset, config_type = load_data_set(str(described["dataset"]))
    args = {**described["args"], "seed": described["seed"], "size": described["size"]}
    try:
        config: Any = config_type(**args)
        if hasattr(config, "validate"):
            config.validate()
        return dataset(config)
    except (AssertionError, TypeError, ValueError, AttributeError) as err:
        raise ConfigError(
            f"args = {described['args']!r}: data set {described['dataset']!r} refuses them: {err}"
        ) from err


def load_data_set(name: str) -> tuple[Callable[[Any], _Dataset], Callable[..., Any]]:
    """Returns the data set's class and its config class. Imports no other data sets if that is possible.

    Raises: ConfigError if there is no such data set, or the library can't be imported.
    """
    if (alone := import_data_set(name)) is not None:
        return alone
    known = cast("dict[str, tuple[Any, Any]]", load_gym().DATASETS)
    if name in known:
        return known[name]
    raise ConfigError(f"dataset = {name!r} is not a data set of reasoning-gym{hint(name, list(known))}")


def load_gym() -> Any:
    """Returns the registry of the whole library. Raises: ConfigError if the library can't be imported."""
    try:
        # Import the entire package first: after an aborted import, `factory` alone would exist, half filled.
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as err:
        raise ConfigError(
            f"the source `reasoning_gym` needs the package: {install_command('tasks')} ({err})"
        ) from err


# --- scorers that run nothing -----------------------------------------------------------------------

HARMLESS_SCORERS = frozenset(
    {
        "ab",
        "acre",
        "advanced_geometry",
        "aiw",
        "arc_1d",
        "arc_agi",
        "base_conversion",
        "basic_arithmetic",
        "bf",
        "binary_alternation",
        "bitwise_arithmetic",
        "boxnet",
        "caesar_cipher",
        "calendar_arithmetic",
        "chain_sum",
        "circuit_logic",
        "codeio",
        "coin_flip",
        "color_cube_rotation",
        "complex_arithmetic",
        "count_bits",
        "count_primes",
        "course_schedule",
        "cryptarithm",
        "decimal_arithmetic",
        "decimal_chain_sum",
        "dice",
        "emoji_mystery",
        "family_relationships",
        "figlet_font",
        "fraction_simplification",
        "futoshiki",
        "game_of_life",
        "game_of_life_halting",
        "gcd",
        "graph_color",
        "group_anagrams",
        "gsm_symbolic",
        "isomorphic_strings",
        "jugs",
        "kakurasu",
        "knight_swap",
        "knights_knaves",
        "largest_island",
        "lcm",
        "leg_counting",
        "letter_counting",
        "letter_jumble",
        "list_functions",
        "mahjong_puzzle",
        "manipulate_matrix",
        "maze",
        "mini_sudoku",
        "modulo_grid",
        "needle_haystack",
        "number_filtering",
        "number_format",
        "number_sequence",
        "number_sorting",
        "palindrome_generation",
        "palindrome_partitioning",
        "path_star",
        "polynomial_equations",
        "pool_matrix",
        "power_function",
        "prime_factorization",
        "products",
        "propositional_logic",
        "quantum_lock",
        "ransom_note",
        "rearc",
        "rectangle_count",
        "rotate_matrix",
        "rotten_oranges",
        "rubiks_cube",
        "rush_hour",
        "self_reference",
        "sentence_reordering",
        "shortest_path",
        "simple_equations",
        "simple_geometry",
        "sokoban",
        "spell_backward",
        "string_manipulation",
        "string_splitting",
        "string_synthesis",
        "sudoku",
        "survo",
        "syllogism",
        "time_intervals",
        "tower_of_hanoi",
        "tsumego",
        "word_ladder",
        "word_sequence_reversal",
        "word_sorting",
        "zebra_puzzles",
    }
)
"""Data sets whose scorers read a completion as text and never run it.

The code of each data set was reviewed, together with everything that its `score_answer` calls. In version
0.1.25, nine data sets run a completion as Python, with `eval` or SymPy's `parse_expr`: `binary_matrix`,
`countdown`, `intermediate_integration`, `n_queens`, `polynomial_multiplication`, `puzzle24`,
`simple_integration`, `spiral_matrix`, and `string_insertion`. `composite` may contain any of them. A data set
that is not listed here, such as one of a later version of the library, is treated like these nine.
"""
