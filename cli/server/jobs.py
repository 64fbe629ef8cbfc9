"""Jobs in a file of SQLite: what was asked for, and what became of it."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.core.files.atomic import one_line
from tpuport.errors import ArtifactError

QUEUED, RUNNING, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"

_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    created REAL NOT NULL,
    ended REAL,
    expires REAL,
    tries INTEGER NOT NULL DEFAULT 0,
    asked TEXT NOT NULL,
    result TEXT,
    error TEXT,
    once TEXT,
    body TEXT
);
CREATE INDEX IF NOT EXISTS by_status ON jobs (status, number);
CREATE INDEX IF NOT EXISTS by_owner ON jobs (owner, number);
CREATE UNIQUE INDEX IF NOT EXISTS by_once ON jobs (owner, once);
"""
_COLUMNS = "number, id, owner, status, created, ended, expires, tries, asked"
_COLUMNS += ", result, error, once, body"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        number: in the order of arrival.
        owner: the digest of a key; empty without keys.
        created, ended, expires: in seconds since the epoch.
        tries: how often an engine was lost with the job, after calls with others
            with the job alone.
        asked: ``fields``, ``values``, ``seeds``, ``digests``, ``steps``, ``fps``,
            ``num_frames``, ``size`` and ``model``.
        result: ``frames``, ``stages``, ``total_seconds`` and peaks.
        error: in one line; empty for none.
        once: of the owner's jobs one at most has this key of a client's; ``None`` for
            no key.
        body: the digest of the request that came with the key.
    """

    id: str
    owner: str
    asked: dict[str, Any]
    number: int = 0
    status: str = QUEUED
    created: float = 0.0
    ended: float | None = None
    expires: float | None = None
    tries: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    once: str | None = None
    body: str = ""


def new_id() -> str:
    """An id that nobody guesses: 128 random bits."""
    return f"video_{secrets.token_hex(16)}"


class Jobs:
    """The file of jobs; threads may share it.

    Args:
        file: made where it is not there.

    Raises:
        ArtifactError: it is no file of jobs, or is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._lock = threading.RLock()
        try:
            self._base = sqlite3.connect(file, check_same_thread=False)
            self._base.isolation_level = None  # each statement is a transaction
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.executescript(_TABLE)
            found = self._base.execute("PRAGMA quick_check").fetchone()[0]
            self._base.execute(f"SELECT {_COLUMNS} FROM jobs LIMIT 1")
        except sqlite3.Error as error:
            raise ArtifactError(
                f"{file} is no file of jobs: {one_line(error)}; name another folder"
            ) from error
        if found != "ok":
            raise ArtifactError(
                f"{file} is damaged: {found[:200]}; name another folder"
            )

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._base.close()

    def _all(self, where: str, *values: Any) -> list[Job]:
        text = f"SELECT {_COLUMNS} FROM jobs {where}"
        with self._lock:
            rows = self._base.execute(text, values).fetchall()
        return [_job(row) for row in rows]

    def add(self, job: Job, limit: int) -> bool:
        """Put a job into the queue; tells whether the job is in it.

        It is not where the queue is full, or where another job has its ``once``.

        Args:
            limit: jobs that may wait.
        """
        own = (job.id, job.owner, QUEUED, time.time(), json.dumps(job.asked))
        with self._lock:
            if self.count(QUEUED) >= limit:
                return False
            added = self._base.execute(
                "INSERT OR IGNORE INTO jobs "
                "(id, owner, status, created, asked, once, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*own, job.once, job.body),
            )
        return added.rowcount == 1

    def get(self, name: str, owner: str | None = None) -> Job | None:
        """The job of an id, and of an owner where one is given."""
        found = self._all("WHERE id = ?", name)
        if not found or owner not in (None, found[0].owner):
            return None
        return found[0]

    def once(self, owner: str, once: str) -> Job | None:
        """The job of an owner that was asked for with a client's key."""
        found = self._all("WHERE owner = ? AND once = ?", owner, once)
        return found[0] if found else None

    def page(self, owner: str, after: Job | None, limit: int, *, up: bool) -> list[Job]:
        """Jobs of an owner, the newest first, or the oldest first where ``up``."""
        sign, order = (">", "ASC") if up else ("<", "DESC")
        start = after.number if after else (0 if up else 1 << 62)
        where = f"WHERE owner = ? AND number {sign} ? ORDER BY number {order} LIMIT ?"
        return self._all(where, owner, start, limit)

    def count(self, status: str) -> int:
        """How many jobs have a status."""
        with self._lock:
            text = "SELECT count(*) FROM jobs WHERE status = ?"
            return int(self._base.execute(text, (status,)).fetchone()[0])

    def position(self, job: Job) -> int:
        """The place of a queued job, from 1."""
        with self._lock:
            text = "SELECT count(*) FROM jobs WHERE status = ? AND number <= ?"
            found = self._base.execute(text, (QUEUED, job.number)).fetchone()
        return max(int(found[0]), 1)

    def oldest(self) -> Job | None:
        """The job that has waited longest."""
        found = self._all("WHERE status = ? ORDER BY number LIMIT 1", QUEUED)
        return found[0] if found else None

    def queued(self, owner: str) -> list[Job]:
        """The jobs of an owner that wait, the oldest first."""
        where = "WHERE status = ? AND owner = ? ORDER BY number"
        return self._all(where, QUEUED, owner)

    def begin(self, names: Sequence[str]) -> None:
        """Note that jobs run from now on."""
        marks = ", ".join("?" * len(names))
        with self._lock:
            self._base.execute(
                f"UPDATE jobs SET status = ? WHERE id IN ({marks})", (RUNNING, *names)
            )

    def again(self, name: str, *, lost: bool = False, anew: bool = False) -> None:
        """Put a job that ran back into the queue, where it was.

        Args:
            lost: it has cost an engine.
            anew: what it has cost before does not count.
        """
        with self._lock:
            self._base.execute(
                "UPDATE jobs SET status = ?, tries = tries * ? + ? "
                "WHERE id = ? AND status = ?",
                (QUEUED, int(not anew), int(lost), name, RUNNING),
            )

    def recover(self, keep: float) -> None:
        """Put back what ran when the last server ended.

        Args:
            keep: seconds after their end until jobs expire, also those that have ended.
        """
        with self._lock:
            self._base.execute(
                "UPDATE jobs SET status = ? WHERE status = ?", (QUEUED, RUNNING)
            )
            self._base.execute("UPDATE jobs SET expires = ended + ?", (keep,))

    def ended(
        self, name: str, keep: float, *, error: str = "", result: Any = None
    ) -> None:
        """Note that a job is done or has failed; of one that is gone, nothing.

        Args:
            keep: seconds until it expires.
        """
        now = time.time()
        self._set(
            name,
            status=FAILED if error else COMPLETED,
            ended=now,
            expires=now + keep,
            error=error or None,
            result=json.dumps(result or {}),
        )

    def delete(self, name: str) -> None:
        """Forget a job."""
        with self._lock:
            self._base.execute("DELETE FROM jobs WHERE id = ?", (name,))

    def expired(self) -> list[str]:
        """The ids of jobs that are not kept any longer."""
        return [job.id for job in self._all("WHERE expires < ?", time.time())]

    def known(self, names: Sequence[str]) -> set[str]:
        """Those of some ids that are jobs."""
        return {name for name in names if self.get(name) is not None}

    def _set(self, name: str, **values: Any) -> None:
        text = ", ".join(f"{column} = ?" for column in values)
        with self._lock:
            self._base.execute(
                f"UPDATE jobs SET {text} WHERE id = ?", (*values.values(), name)
            )


def _job(row: Sequence[Any]) -> Job:
    number, name, owner, status, created, ended, expires, tries, asked, *rest = row
    return Job(
        number=number,
        id=name,
        owner=owner,
        status=status,
        created=created,
        ended=ended,
        expires=expires,
        tries=tries,
        asked=json.loads(asked),
        result=json.loads(rest[0] or "{}"),
        error=rest[1] or "",
        once=rest[2],
        body=rest[3] or "",
    )
