"""Prints how far ported code is from upstream's: ``python -m tests.measure.accuracy``.

The examples of ``tests/pipelines`` whose names hold one of the arguments, or those of
CogVideoX, HunyuanVideo and Wan: small pipelines with random weights, in float32 on
eight virtual CPU devices. A module's row also has the distance of upstream's own result
from float64: a difference of that size is rounding. A video's row has a mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
import tpuport
from tests.modules.small import called
from tests.pipelines.example import Example, all_examples, difference, made, run

FAMILIES = ("CogVideoX", "HunyuanVideo", "Wan")
MESHES = ("dp=1", "sp=8", "dp=2,sp=2,tp=2")
HEADER = """\
| pipeline | what | largest difference | upstream's own from float64 |
| --- | --- | --- | --- |"""


def modules(one: Example) -> Iterator[tuple[str, float, str]]:
    """Each module's method that the pipeline calls, on one device."""
    for call in called(one):
        own = call.from_float64(call.on(call.module))
        yield call.name, call.difference("dp=1"), f"{own:.0e}"


def videos(one: Example) -> Iterator[tuple[str, float, str]]:
    """The video, with the plugin that knows the pipeline, on each mesh."""
    pipeline, call = made(one)
    expected = run(pipeline, call)
    for mesh in MESHES:
        twin, _ = made(one)
        with tpuport.ported(twin, mesh=mesh, progress=False):
            yield f"video, {mesh}", difference(run(twin, call), expected), ""


def main(names: list[str]) -> None:
    """Print the table."""
    import jax

    print(HEADER, flush=True)
    for name, one in all_examples().items():
        usual = name.startswith(FAMILIES) and "Modular" not in name
        if one.refused or not (any(n in name for n in names) if names else usual):
            continue
        for found in (modules(one), videos(one)):
            for what, worst, own in found:
                print(f"| {name} | {what} | {worst:.0e} | {own} |", flush=True)
        jax.clear_caches()  # programs of all examples together take many GiB


if __name__ == "__main__":
    main(sys.argv[1:])
