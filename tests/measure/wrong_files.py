"""Trials on files: damaged ones, bad checkpoints, disks without room."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.cli.tools import Ran
from tests.measure.damage import damaged, damaged_bytes, damages, reseal
from tests.measure.places import Place, Trial
from tests.measure.verdicts import of_end, of_leftovers, of_named, of_pair
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import keep_asked
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.sealed_json import sidecar_path


def _outcome(ran: Ran) -> str:
    return "refused" if ran.code else "made"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _damage(path: Path, rng: random.Random) -> str:
    """Replace a file by damaged bytes, a folder or nothing; says which."""
    how = rng.choice(("bytes", "bytes", "bytes", "a folder", "nothing"))
    data = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "bytes":
        made = damaged_bytes(data, rng)
        path.write_bytes(made)
        return f"{len(made)} of {len(data)} bytes"
    return how


# --- damaged files


def damages_of_files(place: Place, rng: random.Random) -> Trial:
    """A damaged file of a run directory, of a sidecar or of the cache."""
    kind = rng.choice((_run_directory, _resealed, _sidecar, _kept_run, _cache, _demo))
    return kind(place, rng)


def _run_directory(place: Place, rng: random.Random) -> Trial:
    run, video = place.own_run(), place.folder / "fox.gif"
    file = rng.choice(_files(run))
    how = _damage(file, rng)
    command: tuple[object, ...] = rng.choice(
        (
            ("encode", "--run-dir", run),
            ("denoise", "--run-dir", run),
            ("decode", "--run-dir", run, "--out", video),
            place.generate("--run-dir", run, "--out", video),
        )
    )
    ran = place.call(*command)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(video)
    # Without run.json a folder is of no run, and encode needs a request.
    wrong += of_named(ran, run, "no prompt was given")
    if ran.code == 0 and command[0] in ("decode", "generate"):
        wrong += place.of_video(video)
    return Trial(f"{file.name}: {how}, {command[0]}", _outcome(ran), wrong)


def _resealed(place: Place, rng: random.Random) -> Trial:
    """Wrong content of right checksum; what may be is used."""
    run, video = place.own_run(), place.folder / "fox.gif"
    file, what = run / "run.json", "run.json"
    document = json.loads(file.read_text())
    if rng.random() < 0.5:
        damage = rng.choice(list(damages(document, 6)))
        what += f" {damage}"
        document = damaged(document, damage)
    else:
        stage = rng.choice(("encode", "denoise"))
        entry = document["stages"][stage]
        tensors = run / entry["file"]
        what = f"{tensors.name} {_other_tensors(tensors, rng)}"
        entry["sha256"], entry["bytes"] = hash_output(tensors)
        if rng.random() < 0.5:
            entry["tensors"] = {
                name: {"shape": list(value.shape), "dtype": str(value.dtype)[6:]}
                for name, value in load_file(tensors).items()
            }
    reseal(file, document)
    stage = rng.choice(("denoise", "decode"))
    out = ("--out", video) if stage == "decode" else ()
    ran = place.call(stage, "--run-dir", run, *out)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(video)
    return Trial(f"resealed {what}, {stage}", _outcome(ran), wrong)


def _other_tensors(file: Path, rng: random.Random) -> str:
    """Other tensors in a file; says which."""
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    found = tensors[name]
    how = rng.choice(("NaN", "dtype", "shape", "missing", "extra", "empty", "huge"))
    if how == "NaN":
        found.view(-1)[rng.randrange(found.numel())] = float("nan")
    elif how == "huge":
        found.view(-1)[rng.randrange(found.numel())] = 1e30
    elif how == "dtype":
        kinds = (torch.int32, torch.bool, torch.float64, torch.uint8, torch.float16)
        tensors[name] = found.to(rng.choice(kinds))
    elif how == "shape":
        axis = rng.randrange(found.ndim)
        tensors[name] = torch.cat([found, found], axis).contiguous()
    elif how == "empty":
        tensors[name] = found[:0].contiguous()
    elif how == "missing":
        del tensors[name]
    else:
        tensors["extra"] = torch.zeros(3)
    save_file(tensors, file)
    return f"{name} {how}"


def _sidecar(place: Place, rng: random.Random) -> Trial:
    video, again = place.folder / "fox.gif", place.folder / "again.gif"
    sidecar = sidecar_path(video)
    for file in (video, sidecar):
        shutil.copy(place.base / file.name, file)
    document = json.loads(sidecar.read_text())
    if rng.random() < 0.5:
        damage = rng.choice(list(damages(document, 5)))
        reseal(sidecar, damaged(document, damage))
        what = f"resealed sidecar {damage}"
    else:
        file = rng.choice((video, sidecar))
        what = f"{file.name}: {_damage(file, rng)}"
    ran = place.call("replay", rng.choice((video, sidecar)), "--out", again)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(again)
    wrong += of_named(ran, video.name)
    return Trial(f"{what}, replay", _outcome(ran), wrong)


def _kept_run(place: Place, rng: random.Random) -> Trial:
    """A damaged run in the cache is listed, gone on with or named, and removed."""
    cache, video = place.cache, place.folder / "fox.gif"
    run = Path(shutil.copytree(place.base / "denoised", cache / "runs" / "kept"))
    (run / ".lock").write_text("1")
    keep_asked(RunDirectory(run), Settings(), str(video))
    file = run / "asked.json"
    resealed = rng.random() < 0.5
    if resealed:
        document = json.loads(file.read_text())
        damage = rng.choice(list(damages(document, 4)))
        reseal(file, damaged(document, damage))
        what = f"resealed asked.json {damage}"
    else:
        file = rng.choice((file, file, *_files(run)))
        what = f"kept {file.name}: {_damage(file, rng)}"
    wrong = of_end(place.call("runs", "--json"), (0,))
    ran = place.call("resume", "kept")
    # A flag too: where the video or the report goes may be what cannot be.
    wrong += of_end(ran) + of_named(ran, "kept", "--out", "--report")
    wrong += of_leftovers(place.folder)
    wrong += of_pair(video)
    if ran.code == 0 and not resealed:
        wrong += place.of_video(video)
    wrong += of_end(place.call("runs", "clean", "--all"), (0,))
    if left := list((cache / "runs").iterdir()):
        wrong.append(f"runs clean left {left}")
    return Trial(f"{what}, resume", _outcome(ran), wrong)


def _cache(place: Place, rng: random.Random) -> Trial:
    """A damaged program is compiled again."""
    return _with_cache(place, rng, place.own_cache(), "compiled")


def _demo(place: Place, rng: random.Random) -> Trial:
    """A damaged demo checkpoint is made again, or named."""
    return _with_cache(place, rng, place.own_cache(), "demo")


def _with_cache(place: Place, rng: random.Random, cache: Path, part: str) -> Trial:
    video = place.folder / "fox.gif"
    if rng.random() < 0.2:
        folders = [path for path in (cache / part).rglob("*") if path.is_dir()]
        file = rng.choice([cache / part, *folders])
        shutil.rmtree(file)
        file.write_text("a file")
        how = "a file in place of a folder"
    else:
        file = rng.choice(_files(cache / part))
        how = _damage(file, rng)
    what = f"cache {file.relative_to(cache)}: {how}"
    ran = place.call(*place.generate("--out", video), cache=cache)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_named(ran, cache)
    wrong += of_pair(video) + (place.of_video(video) if ran.code == 0 else [])
    return Trial(what, _outcome(ran), wrong)


# --- bad checkpoints


def checkpoints(place: Place, rng: random.Random) -> Trial:
    """One edit of a checkpoint: a line, or the video.

    Another value that may be, of a config or of a weight, makes another video. A
    tokenizer that says other tokens is told.
    """
    weights = place.folder / "weights"
    shutil.copytree(place.base / "weights", weights)
    edit = rng.choice((_config, _config, _weights, _index, _any_file))
    what = edit(weights, rng)
    video = place.folder / "of-weights.gif"
    ran = place.call(*place.generate("--weights", weights, "--out", video))
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(video)
    wrong += of_named(ran, weights, *(path.name for path in weights.iterdir()))
    showed = _outcome(ran)
    if ran.code == 0 and place.of_video(video):
        showed = "another video"
        if "tokenizer" in what and "warning" not in ran.err:
            wrong.append("other tokens without a word")
    return Trial(what, showed, wrong)


def _config(weights: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(weights.rglob("*.json")))
    document = json.loads(file.read_text())
    damage = rng.choice(list(damages(document, 3)))
    file.write_text(json.dumps(damaged(document, damage)))
    return f"{file.relative_to(weights)} {damage}"


def _weights(weights: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(weights.rglob("*.safetensors")))
    return f"{file.relative_to(weights)} {_other_tensors(file, rng)}"


def _any_file(weights: Path, rng: random.Random) -> str:
    file = rng.choice(_files(weights))
    return f"{file.relative_to(weights)}: {_damage(file, rng)}"


def _index(weights: Path, rng: random.Random) -> str:
    """An index of shards, right but for one entry."""
    file = rng.choice(sorted(weights.rglob("*.safetensors")))
    names = sorted(load_file(file))
    places = dict.fromkeys(names, file.name)
    odd = rng.choice(("../x.safetensors", "/etc/passwd", "gone.safetensors", "", 3, []))
    document: dict[str, Any] = {"metadata": {}, "weight_map": places}
    what = rng.choice(("entry", "missing", "map", "document", "right"))
    if what == "entry":
        places[rng.choice(names)] = odd
    elif what == "missing":
        del places[rng.choice(names)]
    elif what == "map":
        document["weight_map"] = odd
    text = json.dumps(odd if what == "document" else document)
    index = Path(f"{file}.index.json")
    index.write_text(text)
    said = "" if what in ("missing", "right") else f" {odd!r}"
    return f"{index.relative_to(weights)} {what}{said}"


# --- disks without room


def disks(place: Place, rng: random.Random) -> Trial:
    """A full disk, or a limit on a file's size, under what a command writes."""
    name = rng.choice(("fox.gif", "fox.mp4", "fox.webm", "frames/"))
    target = rng.choice(("output", "run directory", "cache"))
    limits = rng.random() < 0.4 or not _mounts(place)
    # From what holds nothing to what holds nearly all that is written.
    most = {"output": 17, "run directory": 18, "cache": 24}[target]
    room = int(2 ** rng.uniform(0 if limits else 12, most))
    folder = place.folder / "small"
    folder.mkdir()
    video = (folder if target == "output" else place.folder) / name
    cache = folder / "cache" if target == "cache" else None
    args = place.generate("--out", f"{video.parent}/{name}")
    if target == "run directory":
        args = (*args, "--run-dir", str(folder / "run"))
    with (_limit if limits else _disk)(folder, room):
        ran = place.call(*args, cache=cache)
        wrong = of_end(ran, (0, 1)) + of_leftovers(folder, place.folder)
        wrong += of_named(ran, folder, place.folder, place.base)
        if ran.code == 0:
            wrong += place.of_video(video) + of_pair(video)
        elif os.path.lexists(video) or sidecar_path(video).exists():
            wrong.append(f"{sorted(os.listdir(video.parent))} is half written")
    if ran.code and target == "run directory" and limits:
        again = place.call(*args)  # with room
        wrong += of_end(again, (0,)) + place.of_video(video)
    how = "files of at most" if limits else "a disk of"
    what = f"{target}, {how} {room} bytes, {name}"
    return Trial(what, _outcome(ran), wrong)


@contextlib.contextmanager
def _limit(folder: Path, room: int) -> Iterator[None]:
    """No file of this process or its encoders grows beyond ``room`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _disk(folder: Path, room: int) -> Iterator[None]:
    """A disk of so many bytes, in whole pages, at ``folder``."""
    size = f"size={room}"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "none", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _mounts(place: Place) -> bool:
    """Whether this process may mount a disk."""
    folder = place.folder / "mounted"
    folder.mkdir()
    try:
        with _disk(folder, 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        folder.rmdir()
