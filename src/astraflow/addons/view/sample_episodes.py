"""Episodes from before and after training: `samples/episodes.md` in the folder of a run that has ended."""

from collections.abc import Sequence
from pathlib import Path

from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.terminal_text import printable, speaker_of
from astraflow.report.view import RunPage, ShownRun
from astraflow.types import LeaseKind, Message

__all__ = ["SampleEpisodes", "load_transcripts"]

_Transcript = tuple[TranscriptRow, tuple[Message, ...]]
_NUM_EPISODES = 3


class SampleEpisodes(RunPage):
    """Writes the episodes when the run has ended."""

    def __init__(self, run: ShownRun) -> None:
        self._folder = run.folder

    def report(self) -> None:
        """Writes the file. Raises: JournalError or OSError."""
        write_atomic(self._folder.samples / "episodes.md", _episodes_text(self._folder).encode())


def load_transcripts(journal: Path, kind: LeaseKind) -> list[_Transcript]:
    """Reads the episodes whose messages are kept, in order of arrival. Raises: JournalError."""
    with JournalTables(journal) as tables:
        return [(row, tables.messages(row)) for row in tables.transcripts("kind = ?", kind)]


def _episodes_text(folder: RunFolder) -> str:
    """Returns three episodes each of the first and the last evaluation, from the same tasks if possible."""
    transcripts = load_transcripts(folder.journal, "eval") or load_transcripts(folder.journal, "train")
    if not transcripts:
        return "the run kept no episodes\n"
    policy = transcripts[0][0].policy
    versions = sorted({row.version for row, _ in transcripts if row.policy == policy})
    first = [s for s in transcripts if s[0].policy == policy and s[0].version == versions[0]]
    last = [s for s in transcripts if s[0].policy == policy and s[0].version == versions[-1]]
    shared = _shared_tasks(first, last)
    parts = ["# Before\n", *_episode_lines(first, shared, versions[0])]
    if versions[-1] != versions[0]:
        parts += ["# After\n", *_episode_lines(last, shared, versions[-1])]
    return "\n".join(parts)


def _shared_tasks(first: Sequence[_Transcript], last: Sequence[_Transcript]) -> list[str]:
    """Returns up to three tasks that are in both rounds; tasks whose score changed come first."""
    before = {row.task_id: row.score for row, _ in first}
    after = {row.task_id: row.score for row, _ in last}
    both = [task_id for task_id in before if task_id in after]
    return sorted(both, key=lambda task_id: before[task_id] == after[task_id])[:_NUM_EPISODES]


def _episode_lines(transcripts: Sequence[_Transcript], task_ids: Sequence[str], version: int) -> list[str]:
    by_task = {row.task_id: (row, messages) for row, messages in transcripts}
    examples = [by_task[task_id] for task_id in task_ids] or list(transcripts[:_NUM_EPISODES])
    lines: list[str] = []
    for row, messages in examples:
        lines.append(f"## {printable(row.task_id)}, {row.policy} version {version}, score {row.score:g}\n")
        lines += [
            f"**{speaker_of(message)}**: {printable(message.content, keeps_lines=True)}\n"
            for message in messages
        ]
    return lines
