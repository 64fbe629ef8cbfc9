"""The table of docs/models.md: every video pipeline of diffusers, and what runs.

    python -m tests.pipelines.table > table.md

Every example is run by upstream and by the port, on four virtual devices: a quarter of
an hour on two idle cores.
"""

from __future__ import annotations

import inspect
import re
import sys
import time

import diffusers

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
import tpuport
from tests.pipelines.example import Example, all_examples, difference, made, run
from tpuport.errors import TpuportError
from tpuport.plugins import reader_of

MESH = "dp=2,sp=2"
#: How the module of a pipeline that makes a video gives the frames back.
_FRAMES = re.compile(r"Output\(\s*(frames|videos?)=")


def video_pipelines() -> list[str]:
    """The classic pipelines of the installed diffusers that make videos."""
    found = []
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        if not name.endswith("Pipeline") or not inspect.isclass(cls):
            continue
        if cls.__module__.startswith("diffusers.utils.dummy"):
            continue
        if _FRAMES.search(inspect.getsource(sys.modules[cls.__module__])):
            found.append(name)
    return found


def row(one: Example) -> str:
    """One example: what is special, how near, what it cost."""
    cost = "nothing"
    if (model := reader_of(one.name.partition("-")[0])) is not None:
        cost = f"the plugin of {model}"
    if one.refused:
        return f"| {one.name} | {one.kind} | no: {one.refused} | - | - |"
    started = time.perf_counter()
    try:
        pipeline, call = made(one)
        expected = run(pipeline, call)
        with tpuport.ported(pipeline, mesh=MESH, progress=False):
            worst = difference(run(pipeline, call), expected)
        told = f"{worst:.0e}" if worst < 1e-4 else f"**{worst:.0e}**"
    except TpuportError as error:
        told, cost = f"no: {error}", "-"
    print(f"{one.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return f"| {one.name} | {one.kind} | yes | {told} | {cost} |"


def main() -> None:
    """Print the table."""
    examples = all_examples()
    known = {name.partition("-")[0] for name in examples}
    print("| pipeline | what is special | runs | largest difference | cost |")
    print("| --- | --- | --- | --- | --- |")
    for name in sorted(examples):
        print(row(examples[name]), flush=True)
    for name in video_pipelines():
        if name not in known:
            print(f"| {name} | | not tried | - | - |")


if __name__ == "__main__":
    main()
