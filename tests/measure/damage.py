"""Damage to what tpuport reads: JSON documents, seals, files.

Every function gives the same damage for the same arguments, so that a run of thousands
can be repeated by its seed.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpuport.core.files.sealed_json import document_checksum

#: What is put in the place of a value: other types, empty and huge ones.
VALUES: tuple[Any, ...] = (
    *(None, True, "", "no such word", -1, 10**8, 10**30, 0.5),
    *([], ["x"], [[]], {}, {"x": 1}),
)
#: In place of a missing value.
MISSING = "<missing>"
EXTRA = "<extra>"

Path_ = tuple[str | int, ...]


class Damage(NamedTuple):
    """One value of a document: where, and what takes its place."""

    where: Path_
    value: Any

    @property
    def field(self) -> str:
        """The field in words, such as ``asked.mesh``."""
        return ".".join(map(str, self.where))

    def __str__(self) -> str:
        return f"{self.field}={json.dumps(self.value)[:30]}"


def fields(document: Any, depth: int = 4, where: Path_ = ()) -> Iterator[Path_]:
    """The path of every value of a document down to ``depth``, containers included."""
    if where:
        yield where
    if len(where) >= depth:
        return
    if isinstance(document, dict):
        for key, value in document.items():
            yield from fields(value, depth, (*where, key))
    elif isinstance(document, list) and document:
        yield from fields(document[0], depth, (*where, 0))


def damages(document: Mapping[str, Any], depth: int = 4) -> Iterator[Damage]:
    """Every value of a document replaced by each other value, taken out, and added
    to."""
    for where in fields(document, depth):
        found = value_at(document, where)
        for value in VALUES:
            if type(value) is not type(found):
                yield Damage(where, value)
        yield Damage(where, MISSING)
        if isinstance(found, dict):
            yield Damage((*where, EXTRA), 1)
    yield Damage((EXTRA,), 1)


def value_at(document: Any, where: Path_) -> Any:
    """The value at a path."""
    for key in where:
        document = document[key]
    return document


def damaged(document: Mapping[str, Any], damage: Damage) -> dict[str, Any]:
    """A copy of a document with one damage."""
    made = copy.deepcopy(dict(document))
    *parents, last = damage.where
    holder = value_at(made, tuple(parents))
    if damage.value == MISSING:
        del holder[last]
    else:
        holder[last] = copy.deepcopy(damage.value)
    return made


def reseal(file: Path, document: Mapping[str, Any]) -> None:
    """Write a sealed document as someone who redoes its checksum."""
    sealed = {**document, "checksum": document_checksum(document)}
    file.write_text(json.dumps(sealed))


def sample(
    found: Iterator[Damage], count: int, rng: random.Random | None = None
) -> list[Damage]:
    """At most so many damages: evenly spaced ones, or drawn by ``rng``."""
    listed = list(found)
    if rng is not None:
        return rng.sample(listed, min(count, len(listed)))
    return listed[:: max(-(-len(listed) // count), 1)]


def damage_file(path: Path, rng: random.Random) -> str:
    """Replace a file by other bytes, a folder or nothing; says which."""
    how = rng.choice(("cut", "empty", "grown", "other bytes", "a folder", "nothing"))
    data = path.read_bytes()
    path.unlink()
    at = rng.randrange(max(len(data) - 4, 1))
    made = {
        "cut": data[:at],
        "empty": b"",
        "grown": data + rng.randbytes(64),
        "other bytes": data[:at] + rng.randbytes(4) + data[at + 4 :],
    }
    if how == "a folder":
        path.mkdir()
    elif how in made:
        path.write_bytes(made[how])
    return how
