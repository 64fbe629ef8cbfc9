"""``tpuport doctor``: the machine and the installation, as text for a bug report."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.environment import default_cache_dir, looking, prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.tables import columns
from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.folders import check_folder
from tpuport.core.files.stores import StorePath
from tpuport.core.reports import bytes_text
from tpuport.core.spec.run_settings import COMPILED, DEMO
from tpuport.errors import StoreError, TpuportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_MORE = (
    *("accelerate", "safetensors", "huggingface-hub", "numpy"),
    *("imageio-ffmpeg", "typer", "libtpu"),
)
_VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS"),
    *("TPUPORT_CACHE_DIR", "HF_HOME", "HF_HUB_OFFLINE"),
)

#: Free space below which a full checkpoint and its video may not fit.
LOW_DISK = 2 << 30


@command("doctor")
def doctor(settings: Settings) -> None:
    """Show versions, devices, caches and problems, for a bug report.

    Example: tpuport doctor
    """
    variables = {n: os.environ[n] for n in _VARIABLES if n in os.environ}
    prepare(debug=settings.debug)
    with looking("looking at the installation"):
        folder = settings.cache_dir or default_cache_dir()
        report = examine(folder, settings.cache_store)
    report["environment"] = variables
    give_out(report, as_json=settings.json, text=_text(report))


def examine(cache: Path, store: StorePath | None) -> dict[str, Any]:
    """Everything that is shown, JSON-ready; whatever fails becomes a problem."""
    problems: list[str] = []

    def attempt(what: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except Exception as error:
            # A broken installation is what this command is for.
            problems.append(f"{what}: {type(error).__name__}: {one_line(error)}")
            return None

    packages = versions(*_MORE)
    problems += [
        f"{name} is not installed"
        for name, found in packages.items()
        if found is None and name != "libtpu"  # which not every machine can have
    ]
    report = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": packages,
        "torchax": attempt("torchax", _torchax),
        "devices": attempt("jax devices", _devices),
        "compiler_flags": attempt("compiler flags", _compiler_flags),
        "torch_cuda": attempt("torch", _cuda),
        "plugins": attempt("plugins", _plugins),
        "ffmpeg": attempt("ffmpeg", _ffmpeg),
        "cache": attempt("cache folder", lambda: _cache(cache)),
    }
    found = report["cache"]
    try:
        check_folder("--cache-dir", cache)
        if store is not None:
            store.check_writable()
    except (UsageError, StoreError) as error:
        problems.append(str(error))
    if found and found["free_bytes"] < LOW_DISK:
        problems.append(f"only {bytes_text(found['free_bytes'])} free for {cache}")
    return {**report, "problems": problems}


def _torchax() -> dict[str, Any]:
    from tpuport.core import compat

    declared = compat.declare_missing_overloads()
    module = compat.import_torchax()
    return {
        "imports": True,
        "version": getattr(module, "__version__", None),
        "overloads_known": len(compat.DIMNAME_OVERLOADS),
        "overloads_declared": [f"{op}.{overload}" for op, overload in declared],
    }


def _devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "count": len(devices),
        "kind": devices[0].device_kind,
        "processes": jax.process_count(),
    }


def _compiler_flags() -> dict[str, Any]:
    """What programs for the TPU here are compiled with; without one, the whole table.

    ``chip`` is ``None`` where there is no TPU. ``yours`` is the user's own flag in
    place of a row.
    """
    import jax

    from tpuport.core.mesh import compiler_flags as libtpu_flags

    chosen = libtpu_flags.flags_for(jax.devices()[0])
    ours = libtpu_flags.FLAGS if chosen.chip is None else chosen.applied
    rows = [{**flag.as_dict(), "yours": None} for flag in ours]
    rows += [{**flag.as_dict(), "yours": yours} for flag, yours in chosen.overridden]
    return {"chip": chosen.chip, "flags": rows}


def _cuda() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _plugins() -> list[str]:
    from tpuport.plugins import installed_plugins

    return [
        f"{plugin.model.name} ({plugin.module}, {plugin.package})"
        for plugin in installed_plugins().values()
    ]


def _ffmpeg() -> dict[str, str]:
    import imageio_ffmpeg

    try:
        return {
            "path": imageio_ffmpeg.get_ffmpeg_exe(),
            "version": imageio_ffmpeg.get_ffmpeg_version(),
        }
    except RuntimeError as error:
        raise TpuportError(
            "no ffmpeg: mp4 and webm cannot be written; reinstall imageio[ffmpeg]"
        ) from error


def _cache(cache: Path) -> dict[str, Any]:
    nearest = cache
    while not nearest.exists():
        nearest = nearest.parent
    files = {name: (cache / name).rglob("*") for name in (COMPILED, DEMO, "runs")}
    return {
        "folder": str(cache),
        "bytes": {
            name: sum(p.stat().st_size for p in found if p.is_file())
            for name, found in files.items()
        },
        "unfinished_runs": len(list((cache / "runs").glob("*"))),
        "free_bytes": shutil.disk_usage(nearest).free,
    }


def _flag_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The compiler's flags for the chip here; without one, those of every chip."""
    rows: list[tuple[str, str]] = []
    if found and not found["chip"]:
        by_chip: dict[str, list[str]] = {}
        for flag in found["flags"]:
            for chip in flag["chips"]:
                text = f"--{flag['name']}={flag['value']}"
                by_chip.setdefault(chip, []).append(text)
        rows = [("compiler flags", "no TPU here; what they do is in --json")]
        return rows + [(f"  on {c}", " ".join(by_chip[c])) for c in sorted(by_chip)]
    for flag in found["flags"] if found else ():
        where = ", ".join(flag["stages"])
        text = f"--{flag['name']}={flag['value']} ({where}): {flag['effect']}"
        if flag["yours"]:
            text = f"{flag['yours']}, yours, in place of {text}"
        rows.append(("compiler flag", text))
        rows.append(("", f"source: {flag['source']}"))
    return rows


def _text(report: dict[str, Any]) -> list[str]:
    torchax, devices = report["torchax"], report["devices"]
    ffmpeg, cache = report["ffmpeg"], report["cache"]
    first, *others = report["problems"] or ["none found"]
    rows = [("problems", first), *(("", problem) for problem in others)]
    rows.append(("system", f"{report['system']}, {report['cpus']} CPUs"))
    rows += [(name, v or "not installed") for name, v in report["versions"].items()]
    if torchax:
        counts = f"{len(torchax['overloads_declared'])} of {torchax['overloads_known']}"
        said = f"imports; {counts} removed overloads declared (--json names them)"
        rows.append(("torch/torchax", said))
    if devices:
        said = f"{devices['count']} x {devices['kind']} ({devices['platform']})"
        rows.append(("devices", f"{said}, {devices['processes']} process(es)"))
    rows += _flag_rows(report["compiler_flags"])
    rows.append(("torch GPU", report["torch_cuda"] or "none"))
    rows += [("plugin", text) for text in report["plugins"] or ["none"]]
    if ffmpeg:
        rows.append(("ffmpeg", f"{ffmpeg['version']} at {ffmpeg['path']}"))
    if cache:
        sizes = ", ".join(f"{k} {bytes_text(v)}" for k, v in cache["bytes"].items())
        rows.append(("cache", f"{cache['folder']}: {sizes}"))
        rows.append(("kept runs", str(cache["unfinished_runs"])))
        rows.append(("free disk", bytes_text(cache["free_bytes"])))
    rows += [(name, value) for name, value in report["environment"].items()]
    return columns(rows)
