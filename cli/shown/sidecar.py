"""The JSON beside a video: what a replay needs, and a summary for people."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown.outputs import Outputs
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGES
from tpuport.core.reports import RunReport
from tpuport.core.spec.request import Request

if TYPE_CHECKING:
    import torch

    from tpuport.core.run.session import Session


def describe(
    session: Session,
    run: RunDirectory,
    index: int,
    *,
    latents: torch.Tensor,
    outputs: Outputs,
    report: RunReport,
) -> dict[str, Any]:
    """The sidecar of video ``index`` of a run.

    Where and how a stage ran is in ``stages``, since stages may run on different
    machines. The full report is in what ``--report`` writes.

    Args:
        latents: of all videos of the run, in the leading dim.
    """
    from tpuport.core.run.result import latents_digest

    whole = Request.from_dict(run.settings)
    batch, place = divmod(index, whole.batch_size)
    request = replace(
        whole,
        prompts=whole.prompts[whole.slice(batch)],
        negative_prompts=whole.negative_prompts[whole.slice(batch)],
        seeds=(whole.seeds[batch],),
        sources=whole.sources[whole.slice(batch)],
    )
    given = run.report(STAGES[0]).get("note") or {}
    noise = given.get("initial_latents")
    path = outputs.paths[index]
    return {
        "model": run.model,
        "variant": run.variant,
        "weights": {
            "source": session.checkpoint.reference,
            "fingerprints": run.weights,
        },
        "request": request.as_dict(),
        "video": place,
        "initial_latents": None if noise is None else {**noise, "index": index},
        "source": given.get("source"),
        "stages": {name: _stage(run.report(name), name) for name in STAGES},
        "platform": {
            "system": platform.platform(),
            "backend": session.components.platform,
            "devices": int(session.mesh.devices.size),
            "device_kind": str(session.mesh.devices.flat[0].device_kind),
        },
        "output": {"file": path.name, "kind": outputs.kind},
        "latents_sha256": latents_digest(latents[index : index + 1]),
        "summary": {
            "total_seconds": round(report.total_seconds, 3),
            "peak_host_bytes": report.peak_host_bytes,
            "peak_device_bytes": report.peak_device_bytes,
        },
    }


def _stage(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How a stage of the run was run, and how long it took."""
    note = record.get("note") or {}
    per_call = record["seconds_per_call"]
    entry = {
        "backend": note.get("backend", record["backend"]),
        "attention": note.get("attention", "auto"),
        "dtype": record["dtype"],
        "mesh": record["mesh"],
        "sharding": record["sharding"],
        "blocks": record["blocks"],
        "implementations": record["implementations"],
        "platform": record["platform"],
        "weights": record["weights"],
        "versions": note.get("versions", {}),
        "total_seconds": round(record["total_seconds"], 3),
        "compile_seconds": round(record["compile_seconds"], 3),
        "first_call_seconds": round(record["first_call_seconds"], 3),
        "seconds_per_call": None if per_call is None else round(per_call, 4),
        "programs": _programs(record["compiles"]),
    }
    if name == STAGES[0]:
        entry["encode_on"] = note.get("encode_on", "device")
    if name == STAGES[2]:
        # What was done, which is another video; what was asked where that is not known.
        decided = record["tiling"]
        if decided is None:
            entry["vae_tiling"] = note.get("vae_tiling", "auto")
        else:
            entry["vae_tiling"] = "on" if decided["tiled"] else "off"
    return entry


def _programs(compiles: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many programs were loaded, came from jax's cache, and were compiled."""
    counts = {"loaded": 0, "cached": 0, "compiled": 0}
    for made in compiles:
        kinds = [kind for kind in ("loaded", "cached") if made[kind]]
        counts[(kinds or ["compiled"])[0]] += 1
    return counts
