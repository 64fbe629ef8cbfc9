"""Which requests one call of a pipeline makes together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tpuport.cli.batches.requests import RUNS, Request
from tpuport.core.files.stores import StorePath, place

Pack = tuple[Request, ...]
"""Requests that are alike, one at least."""


def packs(requests: Iterable[Request], size: int) -> list[Pack]:
    """Requests in packs: alike, and with up to ``size`` videos in all.

    Requests are alike whose settings differ in prompts, seeds, negative prompts and
    places alone, and which all or none have a negative prompt. A request that starts
    from an image, a video or ``--latents``, or has no prompt, is a pack of its own, and
    so is one with more than ``size`` videos.

    Returns:
        the packs, in the order of their first requests.
    """
    found: list[list[Request]] = []
    last: dict[str, list[Request]] = {}
    for one in requests:
        pack = last.get(one.alike, [])
        many = sum(other.count for other in pack) + one.count > size
        if not pack or pack[0].alone or one.alone or many:
            pack = last[one.alike] = []
            found.append(pack)
        pack.append(one)
    return [tuple(pack) for pack in found]


def run_dir(pack: Pack) -> Path:
    """The run directory of a pack, which is that of a request alone.

    The same requests find the same folder again. Its name is no request's key.
    """
    own = pack[0].settings.run_dir
    assert own is not None
    if len(pack) == 1:
        return own
    names = "\n".join(f"{one.key} {one.digest}" for one in pack)
    return own.with_name(f"+{hashlib.sha256(names.encode()).hexdigest()[:16]}")


def kept_in(pack: Pack) -> StorePath | None:
    """The folder of a store that keeps a pack's checkpoints beside the videos.

    ``None`` where the videos go to a disk.
    """
    assert pack[0].settings.out is not None
    video = place(pack[0].settings.out)
    if not isinstance(video, StorePath):
        return None
    return video.parent / RUNS / run_dir(pack).name


def smaller(pack: Pack) -> list[Request]:
    """What to make in place of a pack whose call failed; empty for a single video.

    The videos of a request alone are made one after the other.
    """
    (one, *more) = pack
    if more:
        return [*pack]
    if one.count == 1 or (one.settings.batch_size or 1) == 1:
        return []
    return [replace(one, settings=replace(one.settings, batch_size=1))]


def lines(pack: Sequence[Request]) -> str:
    """The lines of requests, in words."""
    numbers = ", ".join(str(one.line) for one in pack)
    return f"line{'s' * (len(pack) > 1)} {numbers}"
