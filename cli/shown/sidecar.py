"""The JSON beside a video: everything that a replay needs."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown.outputs import Outputs
from tpuport.cli.shown.versions import versions
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGES, blocks_of
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

    Settings of where and how are those of the denoise stage, which makes the latents;
    ``stages`` has them for each stage, since stages may run on different machines.

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
    stages = {name: _stage(run, name) for name in STAGES}
    denoise = stages[STAGES[1]]
    noise = stages[STAGES[0]].pop("initial_latents")
    source = stages[STAGES[0]].pop("source")
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
        "dtype": denoise["dtype"],
        "mesh": denoise["mesh"],
        "attention": denoise["attention"],
        "sharding": denoise["sharding"],
        "blocks": denoise["blocks"],
        "encode_on": stages[STAGES[0]]["encode_on"],
        "backend": denoise["backend"],
        "initial_latents": None if noise is None else {**noise, "index": index},
        "source": source,
        "stages": stages,
        "versions": versions(),
        "platform": {
            "system": platform.platform(),
            "backend": session.components.platform,
            "devices": int(session.mesh.devices.size),
            "device_kind": str(session.mesh.devices.flat[0].device_kind),
        },
        "output": {"file": path.name, "kind": outputs.kind},
        "latents_sha256": latents_digest(latents[index : index + 1]),
        "report": report.as_dict(),
    }


def _stage(run: RunDirectory, name: str) -> dict[str, Any]:
    """How a stage of the run was run."""
    record = run.report(name)
    note = record.get("note") or {}
    entry = {
        "backend": note.get("backend", record.get("backend", "tpuport")),
        "attention": note.get("attention", "auto"),
        "dtype": record.get("dtype"),
        "mesh": record.get("mesh"),
        "sharding": record.get("sharding", "default"),
        "blocks": blocks_of(record),
        "implementations": record.get("implementations", {}),
        "platform": record.get("platform"),
        "weights": record.get("weights"),
        "versions": note.get("versions", {}),
    }
    if name == STAGES[0]:
        entry["encode_on"] = note.get("encode_on", "device")
        entry["initial_latents"] = note.get("initial_latents")
        entry["source"] = note.get("source")
    if name == STAGES[2]:
        # What was done, which is another video; what was asked where that is not known.
        decided = record.get("tiling")
        if decided is None:
            entry["vae_tiling"] = note.get("vae_tiling", "auto")
        else:
            entry["vae_tiling"] = "on" if decided["tiled"] else "off"
    return entry
