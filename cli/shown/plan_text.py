"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown.tables import columns
from tpuport.core.files.run_record import STAGES
from tpuport.core.reports import bytes_text, seconds_text, words

if TYPE_CHECKING:
    from tpuport.core.plan.measure import Measured
    from tpuport.core.plan.plan import Plan, StagePlan

_WORDS = {
    "attention": "attention",
    "matmul": "matrix products",
    "collective": "collectives",
    "other": "other",
}


#: Of a plan, how many meshes and notes are told in short.
SOME = 4


def text(plan: Plan) -> str:
    """What most people ask of a plan, in at most 25 lines."""
    notes = list(dict.fromkeys(plan.notes))
    meshes = list(_meshes(plan))
    if left := len(meshes[1 + SOME :]):
        meshes = [*meshes[: 1 + SOME], f"  and {left} more: --verbose"]
    lines = [*_head(plan), *meshes, *_in_short(plan), *_together(plan)]
    lines += [f"note: {note}" for note in notes[:SOME]]
    more = "programs, attention, collectives, sharding: --verbose, or --report FILE"
    return "\n".join([*lines, more])


def everything(plan: Plan) -> str:
    """All that is known of a plan, a few lines a subject."""
    subjects = [_head, _meshes, _memory, _times, _attention, _convolutions]
    subjects += [_collectives, _sharding]
    lines = [line for subject in subjects for line in subject(plan)]
    lines += [f"note: {note}" for note in dict.fromkeys(plan.notes)]
    return "\n".join(lines)


def _head(plan: Plan) -> Iterator[str]:
    chip = plan.chip
    several = "" if plan.slices == 1 else f"{plan.slices} x "
    yield (
        f"{plan.model} on {several}{plan.topology} ({_devices(plan)}), mesh "
        f"{plan.mesh}, {plan.dtype}, sharding {plan.sharding}, {plan.blocks} blocks"
    )
    yield ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    used = bytes_text(plan.hbm_bytes)
    limit = bytes_text(chip.hbm_usable_bytes)
    verdict = "fits" if plan.fits else "does not fit"
    if any(plan.stage(name) is None for name in STAGES):
        verdict = f"{', '.join(s.name for s in plan.stages)}: {verdict}"
    yield f"{verdict}: {used} of {limit} HBM per {_device(plan)}"
    if not plan.fits:
        yield "  try --mesh auto, a smaller --size, fewer --frames, or a larger slice"
    yield from _streams(plan)


def _streams(plan: Plan) -> Iterator[str]:
    """What comes from the host's memory, and what the link takes for that."""
    speed = f"{plan.chip.host_bandwidth / 1e9:g} GB/s"
    for stage in plan.stages:
        size = max((p.memory.host for p in stage.programs), default=0)
        if not size:
            continue
        text = f"{bytes_text(size)} of weights per {_device(plan)} stream from the host"
        if stage.link_seconds is not None:
            waited = seconds_text(stage.bounds().get("host link", 0.0))
            link = seconds_text(stage.link_seconds)
            text += f", {link} a {_unit(stage)} at {speed}, {waited} of it waited for"
        yield f"  {stage.name}: {text}"


def _devices(plan: Plan) -> str:
    chip, count = plan.chip, plan.mesh.size
    if chip.devices_per_chip == 1:
        return f"{count} x {chip.title}"
    chips = count // chip.devices_per_chip
    return f"{count} devices on {chips} chip{'s' * (chips > 1)} of {chip.title}"


def _device(plan: Plan) -> str:
    """What a figure is of: a chip has two devices on some generations."""
    return "chip" if plan.chip.devices_per_chip == 1 else "device"


def _meshes(plan: Plan) -> Iterator[str]:
    if not plan.meshes:
        return
    yield "meshes, the fastest that fits first:"
    for found in plan.meshes:
        name = _mesh_name(found["mesh"])
        step = found["seconds_per_step"] or found["stage_seconds"]
        if not found["compiled"]:
            what = found["reason"]
        elif not found["fits"]:
            what = f"does not fit: {bytes_text(found['hbm_bytes_per_chip'])}"
        else:
            what = f"{seconds_text(step)}, {bytes_text(found['hbm_bytes_per_chip'])}"
        yield f"  {name}: {what}"


def _memory(plan: Plan) -> Iterator[str]:
    yield f"memory per {_device(plan)}:"
    names = ("weights", "inputs", "temporaries", "code", "resident", "total")
    rows = [["program", *names]]
    rows[0][3] = "activations"
    for program in plan.programs:
        sizes = [bytes_text(getattr(program.memory, name)) for name in names]
        if program.error:
            # Refused by the compiler, which tells one figure for all but weights.
            sizes[1] = sizes[3] = "-"
        rows.append([_name(program), *sizes])
    yield from _figures(rows)


def _in_short(plan: Plan) -> Iterator[str]:
    rows = [("stage", "HBM", "of it weights", "a call", "calls", "in all", "bound by")]
    for stage in plan.stages:
        memory = max((p.memory for p in stage.programs), key=lambda m: m.total)
        seconds = [stage.seconds_per_call, stage.seconds]
        call, whole = ("-" if s is None else seconds_text(s) for s in seconds)
        sizes = bytes_text(memory.total), bytes_text(memory.weights)
        bound = "" if stage.seconds is None else str(stage.bound)
        rows.append((stage.name, *sizes, call, str(stage.calls), whole, bound))
    yield from columns(rows, right=range(1, 6))


def _times(plan: Plan) -> Iterator[str]:
    for stage in plan.stages:
        yield from _stage(stage)
    yield from _together(plan)
    if plan.compiler_flags:
        yield f"with compiler flags: {' '.join(plan.compiler_flags)}"


def _together(plan: Plan) -> Iterator[str]:
    left = [n for n in STAGES if plan.stage(n) is None]
    if left:
        yield f"not planned: {', '.join(left)} (--stage all plans them too)"
    known = {s.name: s.seconds for s in plan.stages if s.seconds is not None}
    if len(known) > 1:
        yield (
            ("together: " if left else "whole run: ")
            + " + ".join(f"{name} {seconds_text(s)}" for name, s in known.items())
            + f" = {seconds_text(sum(known.values()))}"
        )
    yield (
        f"compile: {plan.compile_seconds:.1f} s on this machine, "
        f"{plan.program_bytes / 2**20:.1f} MiB of programs"
    )


def _unit(stage: StagePlan) -> str:
    """What a call of a stage's programs is called."""
    return "step" if stage.name == STAGES[1] else "call"


def _stage(stage: StagePlan) -> Iterator[str]:
    if stage.seconds is None or stage.seconds_per_call is None:
        yield f"{stage.name}: no time, since it does not fit"
        return
    unit = _unit(stage)
    yield (
        f"{stage.name}: {seconds_text(stage.seconds_per_call)} a {unit}, {stage.calls} "
        f"{unit}s, {seconds_text(stage.seconds)}"
    )
    each = stage.seconds_per_call
    yield "  " + ", ".join(
        f"{_WORDS[name]} {seconds_text(seconds)} ({seconds / each:.0%})"
        for name, seconds in stage.split().items()
    )
    yield (
        f"  bound by the {stage.bound}: "
        + ", ".join(f"{n} {s / each:.0%}" for n, s in stage.bounds().items())
    )
    if stage.floor_per_call is not None:
        yield (
            f"  not below {seconds_text(stage.floor_per_call)}: kernels and "
            "collectives as they are, all else at the peak of MXU or HBM"
        )
    if stage.utilization is not None:
        yield (
            f"  {stage.flops / stage.calls / 1e12:.4g} TFLOP a {unit}, "
            f"{stage.utilization:.1%} of the chips' peak"
        )


def _collectives(plan: Plan) -> Iterator[str]:
    head = ("program", "kind", "axis", "count", "bytes", "time", "waited for")
    rows = []
    for program in plan.programs:
        for use in program.account.collectives() if program.account else ():
            times = map(seconds_text, (use.seconds, use.exposed_seconds))
            about = (use.kind, use.axis or "-", str(use.count), bytes_text(use.bytes))
            rows.append((_name(program), *about, *times))
    if not rows:
        yield "collectives: none"
        return
    yield f"collectives of one call, per {_device(plan)}:"
    yield from _figures([head, *rows])


def _attention(plan: Plan) -> Iterator[str]:
    calls: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for program in plan.programs:
        for record in program.attention:
            _, names = calls.setdefault(str(record), (record, []))
            if _name(program) not in names:
                names.append(_name(program))
    if calls:
        yield "attention calls, by what they run as:"
    for call, names in calls.values():
        blocks = [f"{name} {size}" for name, size in call["blocks"].items()]
        how = ", ".join([call["implementation"], *blocks])
        yield f"  {', '.join(names)}: {how}"
        yield f"    {_shape(call)}"
        yield f"    {_split(call, plan.mesh.shape)}"
        yield f"    {call['reason']}"


def _convolutions(plan: Plan) -> Iterator[str]:
    """One line for all that run as one thing for one reason, with their programs."""
    found: dict[str, list[str]] = {}
    for program in plan.programs:
        for record in program.convolutions:
            found.setdefault(words(record), []).append(_name(program))
    if found:
        yield "convolutions of one call, by what they run as:"
    for told, names in found.items():
        yield f"  {', '.join(dict.fromkeys(names))}: {told}"


def _shape(record: Mapping[str, Any]) -> str:
    batch, heads, queries, width = record["query"]
    keys = record["key"][2]
    tokens = f"{queries} queries x {keys} keys"
    if record["padded"] not in (None, queries):
        tokens += f" (padded to {record['padded']})"
    parts = [f"batch {batch}, {heads} heads of {width}", tokens, record["dtype"]]
    words = {
        "causal": "causal",
        "frame_tokens": f"frames of {record['frame_tokens']} see those before",
        "key_lengths": "each item with its own number of keys",
        "window": "window {},{}".format(*(record["window"] or (0, 0))),
        "k_smooth": "k_smooth",
    }
    parts += [told for name, told in words.items() if record[name]]
    return ", ".join(parts)


def _split(record: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    batch, heads, tokens, _ = record["split"]
    joint = record["padded"] is not None
    along = {"batch": batch, "heads": heads, "tokens" if joint else "queries": tokens}
    parts = [
        f"{what} over {axis}={sizes[axis]}" for what, axis in along.items() if axis
    ]
    if not parts:
        return "not split"
    if tokens and joint:
        how = f"ulysses {record['ulysses']} x ring {record['ring']}"
        if record.get("ring_keys"):
            how += f", keys {record['ring_keys']}"
        parts[-1] += f" ({how})"
    elif tokens:
        parts[-1] += " (keys are gathered)"
    return ", ".join(parts)


def _sharding(plan: Plan) -> Iterator[str]:
    for sharding in plan.sharding_plans:
        yield f"{sharding.component} on mesh {_mesh_name(sharding.mesh)}"
        yield from columns(sharding.table(), indent="  ", right=(1, 2))
        yield from (f"  {line}" for line in sharding.remarks())


def _name(program: Measured) -> str:
    return f"{program.stage}/{program.program}"


def _figures(rows: Sequence[Sequence[str]]) -> list[str]:
    return columns(rows, indent="  ", right=range(1, len(rows[0])))


def _mesh_name(sizes: Mapping[str, int]) -> str:
    """A mesh as ``--mesh`` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
