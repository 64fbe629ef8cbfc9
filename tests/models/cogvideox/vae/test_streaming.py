"""A whole decode, streamed: the bytes of the float video, which is never held."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tpuport.core.files.frames import to_uint8
from tpuport.core.run.frame_delivery import Delivery

FRAMES, HEIGHT, WIDTH = 49, 64, 96
#: Of two latent frames each; the first has an odd one more.
CHUNKS = ((FRAMES - 1) // 4 + 1) // 2


class Counts(Heard):
    """Keeps what was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered_: list[tuple[int, int]] = []

    def delivered(self, stage: str, frames: int, total: int) -> None:
        self.delivered_.append((frames, total))


@pytest.fixture(scope="module")
def heard() -> Counts:
    return Counts()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, heard: Counts) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with tpuport.load("cogvideox", cache_dir=cache, reporter=heard) as session:
        yield session


@pytest.fixture(scope="module")
def asked(session: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A request, and latents for it."""
    request = session.request(
        prompt="a cat", height=HEIGHT, width=WIDTH, num_frames=FRAMES
    )
    shape = session.port.latent_shape(request, session.checkpoint)
    return request, {"latents": torch.randn(shape, generator=torch.manual_seed(1))}


def test_chunks_in_a_row_are_the_bytes_of_the_video(
    session: Any, asked: Any, heard: Counts
) -> None:
    """Over 10 s: a first and a following chunk of floats, and of bytes."""
    request, latents = asked
    whole, _ = session.run_stage("decode", request, latents)
    heard.delivered_.clear()
    parts: list[np.ndarray] = []
    delivery = Delivery("uint8", lambda first, frames: parts.append(frames))
    made, report = session.run_stage("decode", request, latents, delivery=delivery)
    delivery.check()
    assert made == {}
    assert len(parts) == CHUNKS
    assert [part.shape[1] for part in parts] == [9] + [8] * (CHUNKS - 1)
    assert np.array_equal(np.concatenate(parts, axis=1), to_uint8(whole["frames"]))
    # Progress for each chunk, and two programs for all of them.
    assert heard.delivered_ == [(9 + 8 * n, FRAMES) for n in range(CHUNKS)]
    assert len(report.compiles) == 2


def test_the_host_holds_one_chunk(session: Any, asked: Any, tmp_path: Path) -> None:
    request, latents = asked
    float_video = FRAMES * HEIGHT * WIDTH * 3 * 4
    session.run_stage("decode", request, latents, delivery=Delivery("uint8"))
    given: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []
    pictures: list[int] = []

    def sink(first: int, frames: np.ndarray) -> None:
        given.append(weakref.ref(frames))
        alive.append(sum(ref() is not None for ref in given))
        # Arrays on the device that have the planes of pictures, [B, 3, F, Y, X].
        arrays = [
            array
            for array in jax.live_arrays()
            if array.ndim == 5
            and array.shape[1] == 3
            and array.shape[3:] == (HEIGHT, WIDTH)
        ]
        assert all(array.dtype == np.uint8 for array in arrays)
        pictures.append(sum(array.shape[2] for array in arrays))

    tracemalloc.start()
    session.run_stage("decode", request, latents, delivery=Delivery("uint8", sink))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(given) == CHUNKS
    assert max(alive) == 1
    # One chunk, as an array and as the shard of it that is fetched; there is one while
    # a sink has the chunk before.
    assert max(pictures) >= 8
    assert max(pictures) <= 2 * 9
    # All of NumPy's and Python's memory of the stage, the latents' chunks included.
    assert peak < float_video / 4
