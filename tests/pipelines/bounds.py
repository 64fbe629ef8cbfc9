"""What ``tpuport check`` holds small pipelines to, and which faults it finds.

    python -m tests.pipelines.bounds [--sound] NAME ...

A name is an example of ``tests/pipelines/examples.yaml``, or a plugin. ``--sound``
leaves out the faults. A line says how near the worst call is to what rounding allows;
then each fault is put into the last block of the denoiser of the ported pipeline, and a
line says whether the fault was named, and whether 1e-4 on calls would have seen it.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
from tests.pipelines.example import all_examples, made
from tpuport import targets
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.checked import Subject, arguments
from tpuport.core.drive.compared import Compared, Pair
from tpuport.core.drive.rounding import LEAST, MOST
from tpuport.core.enums import denoises
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import modules_of
from tpuport.plugins import find_plugin


def pair_of(name: str) -> Pair:
    """Two pipelines with equal weights, and their call."""
    if find_plugin(name) is None:
        ours, given = made(all_examples()[name])
        given = {"output_type": "np", **given}
        theirs = made(all_examples()[name])[0]
    else:
        folder = Subject.find(name, Settings(), Reporter()).made(Settings(), Reporter())
        folder = replace(folder, whole=folder.modules())
        ours, theirs = (folder.load(torch.float32, Reporter()) for _ in range(2))
        given = arguments(folder, Settings())
    for one in (ours, theirs):
        one.set_progress_bar_config(disable=True)

    def call() -> dict[str, Any]:
        return {**given, "generator": torch.Generator("cpu").manual_seed(0)}

    return Pair(ours=ours, theirs=theirs, arguments=call)


def _last_block(pipeline: Any) -> torch.nn.Module:
    net = next(m for n, m in modules_of(pipeline).items() if denoises(n))
    lists = [m for m in net.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    return max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))[-1]


def _linear(block: torch.nn.Module) -> Any:
    return [m for m in block.modules() if isinstance(m, torch.nn.Linear)][-1]


def scaled(block: torch.nn.Module) -> None:
    """A weight that is 0.5 % too large."""
    _linear(block).weight.data *= 1.005


def without_bias(block: torch.nn.Module) -> None:
    """A bias that is not there."""
    _linear(block).bias.data *= 0


def wrong_eps(block: torch.nn.Module) -> None:
    """A norm whose eps is ten times as large."""
    norm = next(m for m in block.modules() if getattr(m, "eps", None))
    norm.eps *= 10


def compared(pair: Pair, name: str) -> Compared:
    """The port on one device."""
    pipeline = type(pair.ours).__name__
    placed = targets.place_for_port(MeshSpec())
    own = Settings(cache_dir=None)
    target = targets.claimed_target(pipeline, placed, own, Reporter())
    return pair.compare(target, pair.expected())


def lines(name: str, faults: bool) -> Iterator[str]:
    """The table's lines of one pipeline."""
    pair, started = pair_of(name), time.perf_counter()
    found = compared(pair, name)
    seconds = time.perf_counter() - started
    calls = ", ".join(
        f"{call} {worst:.0e} of {found.bounds.get(call, LEAST):.0e}"
        for call, (_, worst) in found.calls.items()
    )
    why = found.error or f"{found.first} {found.part} {found.apart:.1e}"
    yield f"| {name} | {calls} | {'equal' if found.equal else why} | {seconds:.0f} s |"
    for fault in FAULTS if faults else ():
        ours = copy.deepcopy(pair.ours)
        try:
            fault(_last_block(ours))
        except (AttributeError, StopIteration, IndexError):
            yield f"|  | {fault.__name__} | no such layer |  |"
            continue
        found = compared(replace(pair, ours=ours), name)
        worst = max(worst for _, worst in found.calls.values())
        old = "seen" if worst >= MOST else "not seen"
        where = f"{found.part} {found.apart:.0e} of {found.allowed:.0e}"
        told = "not found" if found.equal else where
        yield f"|  | {fault.__name__} | {told} | calls {worst:.0e}: {old} by 1e-4 |"


FAULTS: tuple[Callable[[torch.nn.Module], None], ...] = (
    scaled,
    without_bias,
    wrong_eps,
)


def main() -> None:
    """Print the table."""
    sound = "--sound" in sys.argv
    for name in sys.argv[1:]:
        if name != "--sound":
            try:
                print(*lines(name, not sound), sep="\n", flush=True)
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {error} |", flush=True)


if __name__ == "__main__":
    main()
