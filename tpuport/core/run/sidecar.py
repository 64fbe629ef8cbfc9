"""The JSON beside a video: what a replay needs, and a summary for people."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.arrays import dtype_name, to_numpy
from tpuport.core.enums import StageName
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.sources import Source
from tpuport.core.reports import RunReport
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import RunSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where and how a run was made: what its sidecars say beside the request.

    Attributes:
        model, variant: their names.
        weights: what names the checkpoint from any folder.
        fingerprints: of its components, by name; read when they are asked for.
        stages: name of a stage -> its record, with its :func:`stage_note`.
        devices: the platform, how many, and of which kind.
    """

    model: str
    variant: str
    weights: str
    fingerprints: Callable[[], Mapping[str, str | None]]
    stages: Mapping[str, Mapping[str, Any]]
    devices: Mapping[str, Any]

    def inputs(self) -> list[Path]:
        """The files and folders that the run was made from."""
        source = self._note().get("source") or {"files": ()}
        named = [Path(name) for name in (self.weights, *source["files"])]
        return [path for path in named if path.is_absolute()]  # no hub id

    def describe(
        self,
        request: Request,
        latents: torch.Tensor,
        report: RunReport,
        index: int,
        output: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The sidecar of video ``index`` of a run.

        Where and how a stage ran is in ``stages``, since stages may run on different
        machines. The full report is in what ``--report`` writes.

        Args:
            request: of the whole run.
            latents: of all its videos, in the leading dim.
            report: of the whole run.
            output: the file, its kind and its hash.
        """
        batch, place = divmod(index, request.batch_size)
        own = replace(
            request,
            prompts=request.prompts[request.slice(batch)],
            negative_prompts=request.negative_prompts[request.slice(batch)],
            seeds=(request.seeds[batch],),
            sources=request.sources[request.slice(batch)],
        )
        note = self._note()
        noise = note.get("initial_latents")
        return {
            "model": self.model,
            "variant": self.variant,
            "weights": {"source": self.weights, "fingerprints": self.fingerprints()},
            "request": own.as_dict(),
            "video": place,
            "initial_latents": None if noise is None else {**noise, "index": index},
            "source": note.get("source"),
            "given": note.get("given", []),
            "stages": {name: _stage(made, name) for name, made in self.stages.items()},
            "platform": {"system": platform.platform(), **self.devices},
            "output": dict(output),
            "latents_sha256": latents_digest(latents[index : index + 1]),
            "summary": {
                "total_seconds": round(report.total_seconds, 3),
                "peak_host_bytes": report.peak_host_bytes,
                "peak_device_bytes": report.peak_device_bytes,
            },
        }

    def _note(self) -> Mapping[str, Any]:
        """Of the first stage, which has what the run started from."""
        return next(iter(self.stages.values())).get("note") or {}


def stage_note(
    settings: RunSettings,
    *,
    noise: Mapping[str, Any] | None = None,
    source: Source | None = None,
    given: Iterable[str] = (),
) -> dict[str, Any]:
    """How a stage was asked for, for run.json and sidecars.

    Args:
        noise: the file of the initial latents and its hash.
        given: names of tensors that came from memory, which no replay has.
    """
    return {
        "backend": settings.backend,
        "attention": str(settings.attention),
        "encode_on": settings.encode_on,
        "vae_tiling": settings.vae_tiling,
        "versions": versions(),
        "initial_latents": noise,
        "source": None
        if source is None
        else {"kind": source.kind, "files": list(source.files)},
        "given": sorted(given),
    }


def latents_digest(latents: torch.Tensor) -> str:
    """sha256 of the bytes of a latents tensor, its shape and its dtype."""
    digest = hashlib.sha256()
    digest.update(f"{dtype_name(latents.dtype)} {tuple(latents.shape)}".encode())
    digest.update(to_numpy(latents).tobytes())
    return digest.hexdigest()


#: Of a stage's record, what sidecars have too, as it is and rounded.
_AS_RECORDED = (
    *("dtype", "mesh", "sharding", "blocks", "implementations", "platform"),
    "weights",
)
_SECONDS = ("total_seconds", "compile_seconds", "first_call_seconds")


def _stage(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How a stage of the run was run, and how long it took."""
    note = record.get("note") or {}
    per_call = record["seconds_per_call"]
    entry = {
        "backend": note.get("backend", record["backend"]),
        "attention": note.get("attention", "auto"),
        **{name: record[name] for name in _AS_RECORDED},
        "versions": note.get("versions", {}),
        **{name: round(record[name], 3) for name in _SECONDS},
        "seconds_per_call": None if per_call is None else round(per_call, 4),
        "programs": _programs(record["compiles"]),
    }
    if name == StageName.ENCODE:
        entry["encode_on"] = note.get("encode_on", "device")
    if name == StageName.DECODE:
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
