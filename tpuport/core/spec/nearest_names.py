"""The names of weights that are most like a pattern of a layout that matches none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from functools import partial

#: Texts of a pattern's alternatives that are compared with names.
_TEXTS = 16
_DIGITS = re.compile(r"\d+")


def nearest(pattern: str, weights: Iterable[str]) -> str:
    """Up to three ends of weights' names that are most like a pattern, or none.

    Names that differ in numbers alone, such as those of two blocks, count as one: the
    name whose numbers are most like the pattern's.
    """
    most, best = 0.6, dict[str, str]()
    for text in itertools.islice(_spelled(pattern), _TEXTS):
        parts = text.count(".") + 1
        ends: dict[str, dict[str, None]] = {}
        for name in weights:
            split = name.split(".")
            for count in (parts, parts + 1):
                end = ".".join(split[-count:])
                if not end[:1].isdigit():
                    ends.setdefault(_DIGITS.sub("", end), {})[end] = None
        for alike, numbered in ends.items():
            ratio = _alike(_DIGITS.sub("", text), alike)
            if ratio > most:
                most, best = ratio, {}
            if ratio == most:
                best.setdefault(alike, max(numbered, key=partial(_alike, text)))
    return " or ".join([*best.values()][:3])


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _spelled(pattern: str) -> Iterator[str]:
    """The texts of a pattern's alternatives, without what repeats."""
    group = re.search(r"\((?:\?:)?([^()]*)\)", pattern)
    if group:
        before, after = pattern[: group.start()], pattern[group.end() :]
        for part in group[1].split("|"):
            yield from _spelled(before + part + after)
    else:
        for text in pattern.split("|"):
            yield re.sub(r"(?:\\.|\[[^]]*\]|\.)[*+]|[^\w.]", "", text)
