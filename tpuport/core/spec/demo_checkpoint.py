"""The demo checkpoint of a port, made once and kept in the cache folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import WeightsError

_SEAL = "tpuport-demo.json"


def demo_checkpoint(
    port: ModelPort,
    variant: str,
    cache: Path,
    say: Callable[[str], None] = lambda text: None,
    *,
    why: str = "",
) -> Checkpoint:
    """The demo checkpoint of a variant of ``port``; made when absent or damaged.

    Args:
        say: told when it is made.
        why: what it is for, where that is not the demo itself.

    Raises:
        WeightsError: the cache folder cannot be written.
    """
    folder = cache / "demo" / f"{port.name}-{variant}-{port.demo_version}"
    if not _intact(folder):
        for_what = f", {why}" if why else ""
        say(f"making the demo checkpoint of {port.name} in {folder}{for_what}")
        _make(port, variant, folder)
    return Checkpoint(folder, "demo")


def _files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != _SEAL]


def _intact(folder: Path) -> bool:
    """Whether the folder is there and is what was made: the seal says."""
    try:
        seal = json.loads((folder / _SEAL).read_text())
        return bool(seal["fingerprint"] == fingerprint_files(folder, _files(folder)))
    except (OSError, ValueError, KeyError):
        return False


def _make(port: ModelPort, variant: str, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError as error:
        raise WeightsError(
            f"the demo checkpoint cannot be written to {folder.parent}: "
            f"{error.strerror}; choose another folder with --cache-dir"
        ) from error
    try:
        port.make_demo(temporary, variant)
        seal = {"fingerprint": fingerprint_files(temporary, _files(temporary))}
        (temporary / _SEAL).write_text(json.dumps(seal) + "\n")
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            os.replace(temporary, folder)
        except OSError:
            # Another process may have put the same checkpoint there meanwhile.
            if not _intact(folder):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
