"""The world `dive`: agents answer questions of several hops from a corpus, alone or with helpers.

The same arguments give the same tasks, byte for byte. `dive_corpus.py` has pages and questions,
`dive_checklist.py` what a report is worth, `dive_players.py` those who play, `dive_crew.py` the workflow that
gives each helper a conversation.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from recipes.deepdive.dive_checklist import MOST_REPORTED, Checklist
from recipes.deepdive.dive_corpus import MOST_PEOPLE, Corpus, Question, make_corpus

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["QUESTION", "REFUSED", "RETURNED", "UNKNOWN", "Dive", "Diving", "action_in", "checklist_of"]

QUESTION = "Question: "
"""Stands before what an agent is asked; nothing else that the world tells has it, but helpers' answers."""
RETURNED = "The helper answers: "
REFUSED = "No helper is free."
"""The answer to `ask` at the greatest depth, or when all helpers were started."""
UNKNOWN = "That is no action."
NOTHING = "Nothing was found."
MOST_READ = 20_000
"""Characters of a reply in which its action is looked for."""
_MOST_ASKED = 500
"""Characters of a question to a helper."""
_MOST_HOPS = 8
_ACTION = re.compile(r"<(search|open|ask|answer)>(.*?)</\1>", re.DOTALL)
_INSTRUCTION = f"""\
Answer a question from pages of made-up facts, which you know nothing about. At each turn, think, and end \
with one of these actions.

List the titles of pages with some words: <search>WORDS</search>
Show a page: <open>TITLE</open>
Get the answer of a helper, which is told only this: <ask>QUESTION</ask>
End your work: <answer>REPORT</answer>

A report begins with the name that was asked for and a full stop. Then it says every fact that led to it, \
one sentence each: facts are checked one by one. An example:
<answer>luro. pimade lives in sago. sago lies in luro.</answer>

What is no action is answered by: {UNKNOWN}
There are not many turns, and helpers use them too.

"""


def action_in(reply: str) -> tuple[str, str]:
    """The first action in a reply, and what it is about; both are empty without one."""
    found = _ACTION.search(reply[:MOST_READ])
    return (found[1], found[2].strip()) if found else ("", "")


def checklist_of(spec: str) -> Checklist:
    """The checklist of a task, from its `spec`."""
    read = json.loads(spec)
    return Checklist(read["answer"], tuple(read["facts"]))


@dataclass
class Diving:
    """An episode: who asks whom, and what all agents have used together."""

    corpus: Corpus
    checklist: Checklist
    most_depth: int
    most_helpers: int
    questions: list[str] = field(default_factory=list[str])
    """What the agents that are at work were asked. Each waits for the one after it; the last one acts."""
    told: str = ""
    """What the agent that acts was told last."""
    num_helpers: int = 0
    num_turns: int = 0

    @property
    def has_free_helper(self) -> bool:
        """Whether the agent that acts may start a helper."""
        return len(self.questions) <= self.most_depth and self.num_helpers < self.most_helpers


class Dive(InteractiveEnvironment):
    """Questions of the splits `train` and `heldout`, about one corpus; rewards are those of `Checklist`.

    An episode ends when the first agent answers, or after `max_turns` of all agents together.
    """

    def __init__(
        self,
        *,
        num_people: int = 2_000,
        towns: int | Sequence[str] = 200,
        num_lands: int = 40,
        hops: Sequence[int] = (2, 4),
        num_found: int = 3,
        most_depth: int = 3,
        most_helpers: int = 8,
        max_turns: int = 24,
        form: Literal["full", "bare"] = "full",
        size: int = 10_000,
        heldout_frac: float = 0.2,
        seed: int | str = 0,
    ) -> None:
        """`towns`: their number, or their names. `hops`: fewest and most. `num_found`: titles that a search
        lists. `most_depth`: helpers of helpers; an agent at this depth has none. `most_helpers`: helpers that
        an episode may start. `form`: `full` shows instructions to each agent; `bare` the question alone.
        `size`: largest number of tasks of a split.

        Raises: ConfigError, if there can be no such corpus or no such episode.
        """
        num_towns = towns if isinstance(towns, int) else len(towns)
        if not 1 <= num_people <= MOST_PEOPLE or min(num_towns, num_lands) < 1:
            raise ConfigError(
                f"num_people = {num_people}, towns = {towns}, num_lands = {num_lands}: at least 1 of each "
                f"and at most {MOST_PEOPLE} people are possible"
            )
        if len(hops) != 2 or not 1 <= hops[0] <= hops[1] <= _MOST_HOPS:
            raise ConfigError(f"hops = {list(hops)}: give the fewest and the most, 1 to {_MOST_HOPS}")
        if min(most_depth, most_helpers) < 0 or min(num_found, max_turns, size) < 1:
            raise ConfigError(
                f"most_depth = {most_depth}, most_helpers = {most_helpers}, num_found = {num_found}, "
                f"max_turns = {max_turns}, size = {size}: at least 0, 0, 1, 1 and 1 are needed"
            )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        rng = random.Random(f"corpus {seed}")
        self.corpus = make_corpus(rng, num_people=num_people, towns=towns, num_lands=num_lands)
        self._hops = range(hops[0], hops[1] + 1)
        self._num_found = num_found
        self._limits = (most_depth, most_helpers)
        self._max_turns = max_turns
        self._is_full = form == "full"
        self._size = size
        self._heldout_frac = heldout_frac
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        questions = [
            question
            for person in self.corpus.people
            for question in (self.corpus.question(person, num) for num in self._hops)
            if is_heldout(question.text, frac=self._heldout_frac) is (split == "heldout")
        ]
        random.Random(f"tasks {self._seed}").shuffle(questions)
        return [_task(split, idx, question) for idx, question in enumerate(questions[: self._size])]

    def reset(self, task: Task, seed: int) -> tuple[Diving, Observation]:
        diving = Diving(self.corpus, checklist_of(task.spec), *self._limits)
        diving.told = self._begin(diving, task.prompt)
        return diving, Observation(diving.told)

    def step(self, state: Diving, reply: str) -> Observation:
        state.num_turns += 1
        action, about = action_in(reply)
        if action == "answer" and len(state.questions) == 1:
            checklist = state.checklist
            reward = checklist.reward(about, checklist.facts_reported(about))
            return Observation("", reward=reward, is_done=True)
        state.told = self._told(state, action, about)
        return Observation(state.told, is_done=state.num_turns >= self._max_turns)

    def _told(self, state: Diving, action: str, about: str) -> str:
        """What comes of an action that does not end the episode."""
        match action:
            case "search":
                titles = self.corpus.search(about, num=self._num_found)
                return f"Found: {', '.join(titles)}." if titles else NOTHING
            case "open":
                return self.corpus.pages.get(about.lower(), NOTHING)
            case "ask":
                if not state.has_free_helper:
                    return REFUSED
                state.num_helpers += 1
                return self._begin(state, " ".join(about[:_MOST_ASKED].split()))
            case "answer":
                state.questions.pop()
                return RETURNED + about[:MOST_REPORTED]
            case _:
                return UNKNOWN

    def _begin(self, state: Diving, question: str) -> str:
        """What an agent is told that begins."""
        state.questions.append(question)
        return f"{_INSTRUCTION if self._is_full else ''}{QUESTION}{question}"


def _task(split: str, idx: int, question: Question) -> Task:
    spec = json.dumps({"answer": question.answer, "facts": question.facts})
    return Task(id=str(idx), source=split, prompt=question.text, answer=question.answer, spec=spec)
