"""Frames go to the host chunk by chunk: in order, checked, and not all at once."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import tpuport
from tests.core.spec.toys import installed_toy
from tpuport.core.files.frames import as_frames, encode_pixels, to_uint8
from tpuport.core.run import executor as executors
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.errors import PluginError, UsageError, VideoError

CHUNKS, LENGTH, SIDE = 12, 3, 64


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with installed_toy(), tpuport.load("toy", cache_dir=cache) as session:
        yield session


def expected(batch: int) -> np.ndarray:
    """The video of a batch: [B, F, Y, X, 3]."""
    rng = np.random.default_rng(batch)
    shape = (2, CHUNKS * LENGTH, SIDE, SIDE, 3)
    return rng.uniform(-0.1, 1.1, shape).astype(np.float32)


def planes(x: Any, pixels: str) -> dict[str, Any]:
    """What a program of decode gives of [B, F, Y, X, 3]."""
    import jax.numpy as jnp

    return encode_pixels(jnp.moveaxis(x, -1, 1), pixels)


def stage(
    *, every: int = 1, pieces: bool = False, damage: float | None = None
) -> Stage:
    """A decode stage whose program passes on its input, a chunk a call.

    Args:
        every: how many calls it takes to complete frames.
        pieces: give arrays of floats instead of what the program made.
        damage: a value put in the last chunk.
    """

    def plan(ctx: StageContext) -> Work:
        video = expected(ctx.batch)
        if damage is not None:
            video[1, -1, 0, 0, 0] = damage
        held: list[np.ndarray] = []

        def calls() -> Iterator[Call]:
            for i in range(CHUNKS):
                yield Call(ctx.pixels, {"x": video[:, i * LENGTH : (i + 1) * LENGTH]})

        def frames(index: int, output: Any) -> Any:
            made = as_frames(output["frames"], SIDE, SIDE)
            if not pieces and every == 1:
                return {**output, "frames": made}
            held.append(made)
            if len(held) < every:
                return None
            made = np.concatenate(held, axis=1)
            held.clear()
            return made

        return Work(
            carry=np.float32(0), constants=None, calls=calls(), total=CHUNKS,
            to_frames=frames,
        )  # fmt: skip

    def program(pixels: str) -> Program:
        return Program(
            component="vae",
            fn=lambda model, carry, constants, inputs: (
                carry + 1,
                {**planes(inputs["x"], pixels)}
                if not pieces
                else {"frames": planes(inputs["x"], pixels)["frames"]},
            ),
        )

    return Stage(
        name="decode",
        unit="chunk",
        components=("vae",),
        programs={pixels: program(pixels) for pixels in ("float32", "uint8")},
        plan=plan,
        upstream=lambda context: {"frames": np.clip(expected(context.batch), 0, 1)},
        writes=(),
    )


def request(session: Any) -> Any:
    """Two batches of two videos."""
    from dataclasses import replace

    made = session.request(prompt=["a", "b", "c", "d"], seed=[1, 2, 3, 4])
    return replace(made, batch_size=2, seeds=((1, 2), (3, 4)))


def executor(session: Any) -> Executor:
    return Executor(session.components, RunSettings())


@pytest.mark.parametrize("limit", [1, 4])
def test_a_sink_gets_every_frame_once_and_in_order(
    limit: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", limit)
    got: list[tuple[int, np.ndarray]] = []
    delivery = Delivery("uint8", lambda first, frames: got.append((first, frames)))
    tensors, report = executor(session).run(stage(), request(session), {}, delivery)
    assert tensors == {}
    assert report.calls_in_flight == limit
    assert [first for first, _ in got] == [0] * CHUNKS + [2] * CHUNKS
    for first in (0, 2):
        video = np.concatenate([part for n, part in got if n == first], axis=1)
        assert np.array_equal(video, to_uint8(expected(first // 2)))
    delivery.check()


def test_work_that_gives_frames_leaves_no_outputs_on_the_device(session: Any) -> None:
    planned = stage().plan(executor(session).context(request(session), 0, {}))
    # What `plan` goes by as well.
    assert planned.to_host


def test_without_a_sink_the_whole_video_comes_back(session: Any) -> None:
    tensors, _ = executor(session).run(stage(), request(session), {})
    whole = np.concatenate([expected(0), expected(1)])
    assert tensors["frames"].dtype == np.float32
    assert np.array_equal(tensors["frames"], np.clip(whole, 0, 1))
    tensors, _ = executor(session).run(stage(), request(session), {}, Delivery("uint8"))
    assert np.array_equal(tensors["frames"], to_uint8(whole))


def test_calls_may_complete_frames_together(session: Any) -> None:
    lengths: list[int] = []
    delivery = Delivery("float32", lambda _, frames: lengths.append(frames.shape[1]))
    executor(session).run(stage(every=4), request(session), {}, delivery)
    assert lengths == [4 * LENGTH] * (2 * CHUNKS // 4)
    assert delivery.checks._videos[3].frames == CHUNKS * LENGTH


def test_plain_upstream_code_is_streamed_too(session: Any) -> None:
    got: list[np.ndarray] = []
    delivery = Delivery("uint8", lambda first, frames: got.append(frames))
    made = executor(session).run_upstream(
        stage(), request(session), {}, "cpu", delivery
    )
    assert made[0] == {}
    assert np.array_equal(np.concatenate(got)[:2], to_uint8(expected(0)))


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_found_whatever_the_host_gets(
    pixels: str, value: float, session: Any
) -> None:
    delivery = Delivery(pixels, lambda first, frames: None)
    executor(session).run(stage(damage=value), request(session), {}, delivery)
    last = CHUNKS * LENGTH - 1
    with pytest.raises(VideoError, match=f"video 1: 1 of .* from frame {last} on"):
        delivery.check()


def test_floats_without_statistics_are_measured_here(session: Any) -> None:
    delivery = Delivery("float32", lambda first, frames: None)
    damaged = stage(pieces=True, damage=np.nan)
    executor(session).run(damaged, request(session), {}, delivery)
    with pytest.raises(VideoError, match="video 1: 1 of"):
        delivery.check()


def test_bytes_without_statistics_are_refused(session: Any) -> None:
    with pytest.raises(PluginError, match=r"uint8 frames .* without finite, low, high"):
        executor(session).run(
            stage(pieces=True), request(session), {}, Delivery("uint8")
        )


@pytest.mark.parametrize("limit", [1, 3])
def test_the_host_never_holds_the_video(
    limit: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", limit)
    ran = executor(session)
    asked = request(session)
    ran.run(stage(), asked, {}, Delivery("uint8"))  # compiled before it is measured
    given: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []
    on_devices: list[int] = []
    before = sum(a.nbytes for a in jax.live_arrays())

    def sink(first: int, frames: np.ndarray) -> None:
        assert frames.dtype == np.uint8
        given.append(weakref.ref(frames))
        alive.append(sum(ref() is not None for ref in given))
        on_devices.append(sum(a.nbytes for a in jax.live_arrays()) - before)

    inputs = stage()
    made: dict[int, Work] = {}
    # The source of this stage is a whole float video; only what comes after counts.
    works = [inputs.plan(ran.context(asked, b, {}, pixels="uint8")) for b in (0, 1)]
    made.update(enumerate(works))
    planned = Stage(
        name="decode", unit="chunk", components=("vae",), programs=inputs.programs,
        plan=lambda ctx: made[ctx.batch], upstream=inputs.upstream, writes=(),
    )  # fmt: skip
    tracemalloc.start()
    ran.run(planned, asked, {}, Delivery("uint8", sink))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    chunk = 2 * LENGTH * SIDE * SIDE * 3  # bytes; four times that as floats
    assert len(given) == 2 * CHUNKS
    # The frames of one chunk, whatever the length of the video.
    assert max(alive) == 1
    assert peak < 4 * 4 * chunk < CHUNKS * 4 * chunk / 2
    # Inputs and outputs of the calls in flight, and of the call that has ended.
    assert max(on_devices) <= (limit + 1) * (4 + 1) * chunk + 4096


def test_a_session_streams(session: Any) -> None:
    whole = session.generate("a cat", seed=3).frames
    got: list[np.ndarray] = []
    result = session.generate(
        "a cat", seed=3, pixels="uint8", on_frames=lambda _, part: got.append(part)
    )
    assert result.frames.shape[:2] == (1, 0)
    assert result.frames.dtype == np.uint8
    assert np.array_equal(np.concatenate(got, axis=1), to_uint8(whole))
    bytes_ = session.generate("a cat", seed=3, pixels="uint8").frames
    assert np.array_equal(bytes_, to_uint8(whole))
    with pytest.raises(UsageError, match="pixels 'float16'"):
        session.generate("a cat", pixels="float16")
