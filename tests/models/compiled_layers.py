"""What the compiled program of a step does in one layer: its loop's body, as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

KERNEL = 'custom_call_target="tpu_custom_call"'
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
# An instruction that puts elements elsewhere and computes nothing, or a fusion that the
# compiler named so. Not copy-start: from one memory to another in the same order.
_MOVED = re.compile(
    r"%(?P<name>[\w.-]+) = \w+\[(?P<dims>[\d,]*)\]\S* (?P<kind>copy|transpose|fusion)\("
)


def in_a_decoder(text: str) -> dict[str, Any]:
    """Names of the project's kernels, and how many convolutions of 3 x 3 XLA has left
    to itself, sums over the network and loops there are.
    """
    return {
        "kernels": sorted(set(re.findall(r"%(tpuport_[a-z]+)\.", text))),
        "convolutions": len(
            re.findall(r"convolution\(.*window=\{size=(?:\dx)?3x3", text)
        ),
        "reductions": len(re.findall(r" all-reduce(?:-start)?\(", text)),
        "loops": len(re.findall(r" while\(", text)),
    }


def kernels(text: str) -> dict[str, int]:
    """How often a program's text calls each of the project's kernels."""
    calls = re.findall(r"%(tpuport_[a-z_]+)[.\d]* = [^\n]*custom-call\(", text)
    assert len(calls) == text.count(KERNEL)
    return dict(Counter(calls))


def layer_body(text: str) -> str:
    """The one computation, but for the program itself, that has the kernel."""
    parts = [part.strip() for part in text.split("\n\n") if KERNEL in part]
    (body,) = [part for part in parts if not part.startswith("ENTRY")]
    return body


def collectives(body: str) -> dict[str, int]:
    """How many there are of each kind."""
    return {k: len(re.findall(rf" {k}(-start)?\(", body)) for k in COLLECTIVES}


def moved(body: str) -> list[int]:
    """Elements of each array of a thousand or more that is copied or transposed."""
    sizes = []
    for found in _MOVED.finditer(body):
        if found["kind"] == "fusion" and not re.match(
            r"(copy|transpose)", found["name"]
        ):
            continue
        sizes.append(math.prod(int(n) for n in found["dims"].split(",") if n))
    return sorted(size for size in sizes if size >= 1000)


def token_pairs(text: str, counts: set[int]) -> list[str]:
    """Shapes with two dims or more that are among ``counts``."""
    shapes = set(re.findall(r"\w\[(\d+(?:,\d+)+)\]", text))
    return sorted(
        shape for shape in shapes if sum(int(n) in counts for n in shape.split(",")) > 1
    )
