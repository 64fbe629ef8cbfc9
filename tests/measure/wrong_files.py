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

import torch
from safetensors.torch import load_file, save_file

from tests.measure.damage import damage_file, damaged, damages, reseal
from tests.measure.places import (
    SMALL,
    Place,
    Ran,
    Trial,
    of_end,
    of_leftovers,
    of_named,
    of_pair,
)
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import keep_asked
from tpuport.core.files.sealed_json import sidecar_path
from tpuport.plugins import folder_of, get_model


def _outcome(ran: Ran) -> str:
    return "refused" if ran.code else "made"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _resealed(file: Path, rng: random.Random) -> str:
    """Another value under the right checksum; says which."""
    document = json.loads(file.read_text())
    damage = rng.choice(list(damages(document, 5)))
    reseal(file, damaged(document, damage))
    return f"resealed {file.name} {damage}"


def damages_of_files(place: Place, rng: random.Random) -> Trial:
    """A damaged file of a run, a sidecar or the cache."""
    return rng.choice((run_folder, _sidecar, _kept_run, _cache))(place, rng)


def run_folder(place: Place, rng: random.Random) -> Trial:
    """A damaged file of a run: the run says so, or makes the same video."""
    run, video = place.own_run(), place.folder / "fox.gif"
    sealed = rng.random() < 0.5
    file = rng.choice(sorted(run.rglob("*.json")) if sealed else _files(run))
    what = _resealed(file, rng) if sealed else f"{file.name}: {damage_file(file, rng)}"
    at, out = ("--run-dir", run), ("--out", video)
    command: tuple[object, ...] = rng.choice(
        (
            ("encode", *at),
            ("denoise", *at),
            ("decode", *at, *out),
            ("resume", run, *out),
            ("generate", *SMALL, *at, *out),
        )
    )
    ran = place.call(*command)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(video)
    if not sealed:
        # Without run.json a folder is of no run, and encode needs a prompt.
        wrong += of_named(ran, run, "--prompt is missing")
        if ran.code == 0 and out[1] in command:
            wrong += place.of_video(video)
    return Trial(f"{what}, {command[0]}", _outcome(ran), wrong)


def _sidecar(place: Place, rng: random.Random) -> Trial:
    """A damaged video or sidecar is named by ``replay``."""
    video, again = place.folder / "fox.gif", place.folder / "again.gif"
    sidecar = sidecar_path(video)
    for file in (video, sidecar):
        shutil.copy(place.base / file.name, file)
    if rng.random() < 0.5:
        what = _resealed(sidecar, rng)
    else:
        file = rng.choice((video, sidecar))
        what = f"{file.name}: {damage_file(file, rng)}"
    ran = place.call("replay", rng.choice((video, sidecar)), "--out", again)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(again)
    wrong += of_named(ran, video.name)
    return Trial(f"{what}, replay", _outcome(ran), wrong)


def _kept_run(place: Place, rng: random.Random) -> Trial:
    """A damaged run in the cache is listed, gone on with or named, and removed."""
    cache, video = place.cache, place.folder / "fox.gif"
    run = Path(shutil.copytree(place.base / "denoised", cache / "runs" / "kept"))
    (run / ".lock").write_text("1")
    keep_asked(run, Settings(), str(video))
    sealed = rng.random() < 0.5
    if sealed:
        what = _resealed(run / "asked.json", rng)
    else:
        file = rng.choice(_files(run))
        what = f"kept {file.name}: {damage_file(file, rng)}"
    wrong = of_end(place.call("runs", "--json"), (0,))
    ran = place.call("resume", "kept")
    # A flag too: where the video or the report goes may be what cannot be.
    wrong += of_end(ran) + of_named(ran, "kept", "--out", "--report")
    wrong += of_leftovers(place.folder) + of_pair(video)
    if ran.code == 0 and not sealed:
        wrong += place.of_video(video)
    wrong += of_end(place.call("runs", "clean", "--all"), (0,))
    wrong += [f"runs clean left {left}" for left in (cache / "runs").iterdir()]
    return Trial(f"{what}, resume", _outcome(ran), wrong)


def _cache(place: Place, rng: random.Random) -> Trial:
    """A damaged program is compiled again, or named."""
    cache, video = place.own_cache(), place.folder / "fox.gif"
    part = cache / "compiled"
    if rng.random() < 0.2:
        file = rng.choice([part, *(path for path in part.rglob("*") if path.is_dir())])
        shutil.rmtree(file)
        file.write_text("a file")
        how = "a file in place of a folder"
    else:
        file = rng.choice(_files(part))
        how = damage_file(file, rng)
    ran = place.call(*place.generate("--out", video), cache=cache)
    wrong = of_end(ran) + of_leftovers(place.folder) + of_named(ran, cache)
    wrong += of_pair(video) + (place.of_video(video) if ran.code == 0 else [])
    return Trial(f"cache {file.relative_to(cache)}: {how}", _outcome(ran), wrong)


def checkpoints(place: Place, rng: random.Random) -> Trial:
    """One edit of a checkpoint: a line, or a video.

    Another value that may be, of a config or of a weight, makes another video.
    """
    demo = get_model("cogvideox").variants["demo"].folder(folder_of("cogvideox"))
    weights = Path(shutil.copytree(demo or "", place.folder / "weights"))
    edit = rng.choice((_config, _config, _tensor, _index, _any_file))
    what = edit(weights, rng)
    video = place.folder / "fox.gif"
    named = ("--variant", "demo", "--weights", weights, "--out", video)
    ran = place.call(*place.generate(*named))
    wrong = of_end(ran) + of_leftovers(place.folder) + of_pair(video)
    wrong += of_named(ran, weights, *(path.name for path in weights.iterdir()))
    showed = _outcome(ran)
    if ran.code == 0 and place.of_video(video):
        showed = "another video"
    return Trial(what, showed, wrong)


def _config(weights: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(weights.rglob("*.json")))
    document = json.loads(file.read_text())
    damage = rng.choice(list(damages(document, 3)))
    file.write_text(json.dumps(damaged(document, damage)))
    return f"{file.relative_to(weights)} {damage}"


def _tensor(weights: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(weights.rglob("*.safetensors")))
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    found = tensors[name]
    how = rng.choice(("NaN", "huge", "dtype", "shape", "missing", "extra", "empty"))
    if how in ("NaN", "huge"):
        value = float("nan") if how == "NaN" else 1e30
        found.view(-1)[rng.randrange(found.numel())] = value
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
    save_file(tensors, file, {"format": "pt"})
    return f"{file.relative_to(weights)} {name} {how}"


def _any_file(weights: Path, rng: random.Random) -> str:
    file = rng.choice(_files(weights))
    return f"{file.relative_to(weights)}: {damage_file(file, rng)}"


def _index(weights: Path, rng: random.Random) -> str:
    """An index of shards, right but for one value."""
    file = rng.choice(sorted(weights.rglob("*.safetensors")))
    places = dict.fromkeys(sorted(load_file(file)), file.name)
    document = {"metadata": {}, "weight_map": places}
    changed = rng.choice(list(damages(document, 2)))
    if rng.random() < 0.3:
        places[rng.choice(list(places))] = rng.choice(("../x.safetensors", "gone"))
    index = Path(f"{file}.index.json")
    index.write_text(json.dumps(damaged(document, changed)))
    return f"{index.relative_to(weights)} {changed}"


def disks(place: Place, rng: random.Random) -> Trial:
    """A full disk, or a limit on a file's size, under what a command writes."""
    name = rng.choice(("fox.gif", "fox.mp4", "fox.webm", "frames/"))
    target = rng.choice(("output", "run", "cache"))
    limits = rng.random() < 0.4 or os.geteuid() != 0
    # From what holds nothing to what holds nearly all that is written.
    most = {"output": 17, "run": 18, "cache": 24}[target]
    room = int(2 ** rng.uniform(0 if limits else 12, most))
    folder = place.folder / "small"
    folder.mkdir()
    video = (folder if target == "output" else place.folder) / name
    cache = folder / "cache" if target == "cache" else None
    args = place.generate("--out", f"{video.parent}/{name}")
    if target == "run":
        args = (*args, "--run-dir", str(folder / "run"))
    with (_limit if limits else _disk)(folder, room):
        ran = place.call(*args, cache=cache)
        wrong = of_end(ran, (0, 1)) + of_leftovers(folder, place.folder)
        wrong += of_named(ran, folder, place.folder, place.base)
        if ran.code == 0:
            wrong += place.of_video(video) + of_pair(video)
        elif os.path.lexists(video) or sidecar_path(video).exists():
            wrong.append(f"{sorted(os.listdir(video.parent))} is half written")
    if ran.code and target == "run" and limits:
        again = place.call(*args)  # with room
        wrong += of_end(again, (0,)) + place.of_video(video)
    how = "files of at most" if limits else "a disk of"
    return Trial(f"{target}, {how} {room} bytes, {name}", _outcome(ran), wrong)


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
    command = ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", folder]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
