"""The jobs in SQLite: the truth about their state."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import MixGRPOError


class State(StrEnum):
    """Where a job stands. Only the server changes it."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSING = "pausing"
    CANCELLING = "cancelling"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DONE = "done"


WORKING = frozenset({State.RUNNING, State.PAUSING, State.CANCELLING})
"""A worker process has the job."""
ACTIVE = WORKING | {State.QUEUED}
"""The job goes on by itself."""


class UnknownJob(MixGRPOError):
    """There is no job of that id."""


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        id: the job's identity, hash of all that determines its numbers.
        spec: the fields of the job as last submitted; ``spec["iterations"]`` is how far it is to be trained.
        detached: goes on when whoever started the server is gone.
        again: submitted again while it was stopping, so it is queued as soon as it has stopped.
        error: why it failed, in one sentence; ``last_words`` the end of what its worker said.
        queued: when it was last queued, which orders the queue.
    """

    id: str
    state: State
    spec: dict[str, Any]
    detached: bool
    again: bool
    error: str | None
    last_words: str | None
    created: float
    queued: float

    @property
    def iterations(self) -> int:
        """The iteration to train to."""
        return self.spec["iterations"]


_COLUMNS = ("id", "state", "spec", "detached", "again", "error", "last_words", "created", "queued")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, spec TEXT NOT NULL, detached INTEGER NOT NULL, again INTEGER NOT NULL,
    error TEXT, last_words TEXT, created REAL NOT NULL, queued REAL NOT NULL
)
"""


class JobStore:
    """The table of jobs; every change is committed before the call returns."""

    def __init__(self, file: Path):
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute(_SCHEMA)
        file.chmod(0o600)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def find(self, job_id: str) -> Job | None:
        """The job of an id, or None."""
        row = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else _job(row)

    def get(self, job_id: str) -> Job:
        """The job of an id; raises :class:`UnknownJob`."""
        job = self.find(job_id)
        if job is None:
            raise UnknownJob(f"there is no job {job_id[:64]!r} here; `mixgrpo jobs list` shows all")
        return job

    def all(self) -> list[Job]:
        """All jobs, the newest first."""
        return [_job(row) for row in self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs ORDER BY created DESC")]

    def in_states(self, states: frozenset[State]) -> list[Job]:
        """The jobs in any of these states, in the order of the queue."""
        return sorted((job for job in self.all() if job.state in states), key=lambda job: job.queued)

    def put(self, job_id: str, spec: dict[str, Any], state: State, detached: bool) -> Job:
        """Add a job or give an old one a new beginning; it forgets why it failed."""
        now = time.time()
        self._database.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, 0, NULL, NULL, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, "
            "spec = excluded.spec, detached = excluded.detached, again = 0, error = NULL, last_words = NULL, "
            "queued = excluded.queued",
            (job_id, state, json.dumps(spec), detached, now, now),
        )
        return self.get(job_id)

    def change(self, job_id: str, **fields: Any) -> Job:
        """Set some columns of a job and return it."""
        unknown = fields.keys() - set(_COLUMNS)
        if unknown:
            raise KeyError(f"jobs have no column {sorted(unknown)}")
        values = [json.dumps(value) if name == "spec" else value for name, value in fields.items()]
        assignments = ", ".join(f"{name} = ?" for name in fields)
        self._database.execute(f"UPDATE jobs SET {assignments} WHERE id = ?", (*values, job_id))
        return self.get(job_id)


def _job(row: tuple[Any, ...]) -> Job:
    fields = dict(zip(_COLUMNS, row, strict=True))
    fields |= {"state": State(fields["state"]), "spec": json.loads(fields["spec"])}
    return Job(**fields | {"detached": bool(fields["detached"]), "again": bool(fields["again"])})
