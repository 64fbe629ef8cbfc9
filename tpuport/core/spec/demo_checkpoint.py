"""The demo checkpoint of a port, made once and kept in the cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from tpuport.core.files.atomic import cannot_write, temporary_beside
from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.files.typed import checked, read_json
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.run_settings import DEMO
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import ArtifactError, TpuportError, WeightsError

_SEAL = "tpuport-demo.json"

_TEXT = """
a an the of on in at over under near with and slow fast wide close aerial shot view
camera pans follows zooms cinematic realistic animated watercolor red blue green golden
bright dark misty snowy rainy sunny quiet busy old young small giant panda cat dog fox
bird horse whale robot astronaut child woman man dancer musician painter runs jumps
swims flies plays paints sings dances reads looks rides forest river ocean mountain city
street garden desert bridge train boat guitar piano book lantern flower cherry blossom
waterfall sunset sunrise night morning sky cloud star wave leaf window table motion blur
detail light
"""


class Seal(TypedDict):
    """What lies beside a demo checkpoint that was made to its end."""

    fingerprint: str


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
    folder = cache / DEMO / f"{port.name}-{variant}-{port.demo_version}"
    for_what = f", {why}" if why else ""
    made_once(
        folder,
        lambda place: port.make_demo(place, variant),
        f"making the demo checkpoint of {port.name} in {folder}{for_what}",
        say,
    )
    return Checkpoint(folder, DEMO)


def made_once(
    folder: Path, make: Callable[[Path], None], what: str, say: Callable[[str], None]
) -> None:
    """Have ``make`` fill ``folder``, unless it did and nothing is damaged since.

    Args:
        make: takes an empty folder.
        what: for ``say``, which is told when the folder is made.

    Raises:
        WeightsError: the folder cannot be written.
    """
    if not _intact(folder):
        say(what)
        _make(make, folder)


def write_checkpoint(
    folder: Path, pipeline: str, parts: Mapping[str, Any], **classes: str
) -> None:
    """Save parts as a published checkpoint lies on disk, with ``model_index.json``.

    Args:
        folder: empty, or with what is saved otherwise.
        pipeline: the class of the pipeline.
        parts: by folder, what has ``save_pretrained``.
        classes: by folder, the class of what is saved otherwise, such as a tokenizer.
    """
    import diffusers

    with _no_bars():
        for name, part in parts.items():
            part.save_pretrained(folder / name)
    named = {name: type(part).__name__ for name, part in parts.items()} | classes
    index: dict[str, Any] = {
        "_class_name": pipeline,
        "_diffusers_version": diffusers.__version__,
    }
    for name, cls in sorted(named.items()):
        library = "diffusers" if hasattr(diffusers, cls) else "transformers"
        index[name] = [library, cls]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Transformers' bars are off while the block lasts: a demo is small."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def demo_sentences() -> list[str]:
    """Made-up sentences that a demo's tokenizers are trained on."""
    draw = random.Random(0)
    return [" ".join(draw.choices(_TEXT.split(), k=8)) for _ in range(600)]


def _files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != _SEAL]


def _intact(folder: Path) -> bool:
    """Whether the folder is there and is what was made: the seal says."""
    file, remedy = folder / _SEAL, "the demo checkpoint is made again"
    try:
        seal = checked(Seal, read_json(file, ArtifactError, remedy), file, remedy)
        return seal["fingerprint"] == fingerprint_files(folder, _files(folder))
    except (OSError, TpuportError):
        return False


def _make(make: Callable[[Path], None], folder: Path) -> None:
    from safetensors import SafetensorError

    temporary = folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(folder)
        temporary.mkdir()
        make(temporary)
        seal = {"fingerprint": fingerprint_files(temporary, _files(temporary))}
        (temporary / _SEAL).write_text(json.dumps(seal) + "\n")
        if folder.is_dir():
            shutil.rmtree(folder)
        try:
            os.replace(temporary, folder)
        except OSError:
            # Another process may have put the same checkpoint there meanwhile.
            if not _intact(folder):
                raise
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{cannot_write(folder, error)}; --cache-dir names another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
