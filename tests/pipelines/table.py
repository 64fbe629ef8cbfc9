"""The table of docs/models.md: every video pipeline of diffusers, and what runs.

    python -m tests.pipelines.table RESULTS.jsonl [NAME ...] > table.md

Every example is run by upstream, and by the port on every mesh of eight virtual
devices: hours on two idle cores. A finished run is a line of ``RESULTS.jsonl``, and is
not done again; a killed command goes on where it was. An example has a process of its
own and ``LIMIT`` seconds a mesh. ``--print`` in place of names runs nothing.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import re
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import diffusers

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
import tpuport
from tests.pipelines.example import Example, all_examples, difference, made, run
from tests.tolerances import TOLERANCES
from tpuport.plugins import plugin_for

MESHES = ("dp=1", "dp=2", "sp=2", "sp=3", "sp=8", "dp=2,sp=2", "dp=2,sp=2,tp=2")
LIMIT = 400
#: How the module of a pipeline that makes a video gives the frames back.
_FRAMES = re.compile(r"Output\(\s*(frames|videos?)=")

Results = dict[str, dict[str, dict[str, Any]]]
"""What came out, by example and mesh."""


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


def modular_families() -> dict[str, list[str]]:
    """The classes of modular pipelines, by family: a package of diffusers."""
    found: dict[str, list[str]] = {}
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        if name.endswith("ModularPipeline") and name != "ModularPipeline":
            found.setdefault(cls.__module__.split(".")[2], []).append(name)
    return found


def read(file: Path) -> Results:
    """The results so far; a later line wins."""
    found: Results = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        one = json.loads(line)
        found.setdefault(one["name"], {})[one["mesh"]] = one
    return found


def note(file: Path, **one: Any) -> None:
    """Add a result to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(one) + "\n")
    print(one, file=sys.stderr)


def measure(file: Path, name: str, meshes: list[str]) -> None:
    """Run an example on the meshes, in this process."""
    pipeline, call = made(all_examples()[name])
    expected = run(pipeline, call)
    for mesh in meshes:
        started = time.perf_counter()
        told: dict[str, Any] = {}
        try:
            with tpuport.ported(pipeline, mesh=mesh, progress=False):
                told["difference"] = difference(run(pipeline, call), expected)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"[:600]
        seconds = round(time.perf_counter() - started, 1)
        note(file, name=name, mesh=mesh, **told, seconds=seconds)


def measure_all(file: Path, names: list[str]) -> None:
    """Run what is not in the file, each example in a process of its own."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.pipelines.example"])
    for name in names:
        while meshes := [m for m in MESHES if m not in read(file).get(name, {})]:
            process = processes.Process(target=measure, args=(file, name, meshes))
            process.start()
            process.join(LIMIT * len(meshes))
            why = f"the process ended with {process.exitcode}"
            if process.is_alive():
                why = f"took more than {LIMIT * len(meshes)} s"
                process.kill()
                process.join()
            done = read(file).get(name, {})
            if left := [m for m in meshes if m not in done]:
                note(file, name=name, mesh=left[0], error=why)


def row(one: Example, found: dict[str, dict[str, Any]]) -> str:
    """One example: what is special, how near, on which meshes, what it cost.

    A mesh that is not named was not tried.
    """
    cost = "nothing"
    if (plugin := plugin_for(one.name.partition("-")[0])) is not None:
        cost = f"the plugin of {plugin.name}"
    if one.refused:
        return f"| {one.name} | {one.kind} | no: {one.refused} | - | - | - |"
    if not found:
        return f"| {one.name} | {one.kind} | not tried | - | - | - |"
    exact = TOLERANCES["video float32"]
    near = {
        m: found[m]["difference"] for m in MESHES if "difference" in found.get(m, {})
    }
    good = [mesh for mesh, worst in near.items() if worst < exact]
    told = "all" if len(good) == len(MESHES) else "; ".join(good)
    for mesh, one_run in found.items():
        if mesh not in good:
            told += f" (not {mesh}: {one_run.get('error') or near.get(mesh)})"
    worst = f"{max(near[mesh] for mesh in good):.0e}" if good else "-"
    return f"| {one.name} | {one.kind} | yes | {worst} | {told} | {cost} |"


def main() -> None:
    """Measure what is missing, and print the table."""
    file, examples = Path(sys.argv[1]), all_examples()
    names = sys.argv[2:] or sorted(examples, key=lambda n: (not examples[n].gate, n))
    if names != ["--print"]:
        measure_all(file, [name for name in names if not examples[name].refused])
    results = read(file)
    print(
        "| pipeline | what is special | runs | largest difference | exact on | cost |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in sorted(examples):
        print(row(examples[name], results.get(name, {})))
    known = {name.partition("-")[0] for name in examples}
    families = modular_families()
    for name in (*video_pipelines(), *chain.from_iterable(families.values())):
        if name not in known:
            print(f"| {name} | | not tried | - | - | - |")
    run = [family for family, classes in families.items() if known & {*classes}]
    print(f"\n{len(run)} of {len(families)} modular families: {', '.join(run)}.")


if __name__ == "__main__":
    main()
