"""Names of policies, services, errors, fates, and tasks. The index stores each once; rows refer to its id."""

import sqlite3

__all__ = ["Names"]

_MAX_TASKS = 50_000
"""Maximum number of tasks whose ids are cached. The ids of others are looked up."""
_MAX_NAMES = 100_000
"""The same for all other names. It is large because each service that joins has a new name."""


class Names:
    """Assigns ids to names. Example: `names.id_of("actor")`, then `names.flush()`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._names = _Table(database, "names", _MAX_NAMES)
        self._tasks = _Table(database, "tasks", _MAX_TASKS)
        self._database = database
        self._seen: set[tuple[str, int]] = {
            (row[0], row[1]) for row in database.execute("SELECT * FROM seen")
        }
        self._new_seen: list[tuple[str, int]] = []

    def id_of(self, name: str, column: str = "") -> int:
        """Returns the id of a name that isn't a task's. `column` of `episodes` is where the name occurs."""
        name_id = self._names.id_of(name)
        if column and (column, name_id) not in self._seen:
            self._seen.add((column, name_id))
            self._new_seen.append((column, name_id))
        return name_id

    def task_id_of(self, name: str) -> int:
        """Returns the id of a task."""
        return self._tasks.id_of(name)

    def flush(self) -> None:
        """Writes new names to the tables. Raises: sqlite3.Error."""
        self._names.flush()
        self._tasks.flush()
        self._database.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", self._new_seen)
        self._new_seen.clear()


class _Table:
    def __init__(self, database: sqlite3.Connection, table: str, most: int) -> None:
        self._database = database
        self._table = table
        self._most = most
        self._known: dict[str, int] = {}
        self._new: list[tuple[int, str]] = []
        newest = database.execute(f"SELECT max(id) FROM {table}").fetchone()[0]
        self._next_id = (newest or 0) + 1

    def id_of(self, name: str) -> int:
        if (cached := self._known.get(name)) is not None:
            return cached
        # New names stay cached until they are in the table, because they can't be looked up before that.
        if len(self._known) - len(self._new) >= self._most:
            self._known = {name: idx for idx, name in self._new}
        query = f"SELECT id FROM {self._table} WHERE name = ?"
        row = self._database.execute(query, (name,)).fetchone()
        if row is not None:
            name_id = int(row[0])
        else:
            name_id = self._next_id
            self._next_id += 1
            self._new.append((name_id, name))
        self._known[name] = name_id
        return name_id

    def flush(self) -> None:
        self._database.executemany(f"INSERT INTO {self._table} VALUES (?, ?)", self._new)
        self._new.clear()
