"""Names of policies, services, errors, fates, and tasks. The index stores each once; rows refer to its id."""

import sqlite3
from functools import lru_cache

__all__ = ["Names"]

_MAX_TASKS = 50_000
"""Maximum number of tasks whose ids are cached. The ids of others are looked up."""
_MAX_NAMES = 100_000
"""The same for all other names. It is large because each service that joins has a new name."""


class Names:
    """Assigns ids to names, within the caller's transaction. Example: `Names(index).id_of("actor")`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._name_id = lru_cache(_MAX_NAMES)(self._look_up)
        self.task_id_of = lru_cache(_MAX_TASKS)(self._look_up_task)
        """Returns the id of a task."""

    def id_of(self, name: str, column: str = "") -> int:
        """Returns the id of a name that isn't a task's. `column` of `episodes` is where the name occurs."""
        return self._name_id(name, column)

    def _look_up(self, name: str, column: str) -> int:
        name_id = self._id_in("names", name)
        if column:
            self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (column, name_id))
        return name_id

    def _look_up_task(self, name: str) -> int:
        return self._id_in("tasks", name)

    def _id_in(self, table: str, name: str) -> int:
        row = self._database.execute(f"SELECT id FROM {table} WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return int(row[0])
        added = self._database.execute(f"INSERT INTO {table} (name) VALUES (?) RETURNING id", (name,))
        return int(added.fetchone()[0])
