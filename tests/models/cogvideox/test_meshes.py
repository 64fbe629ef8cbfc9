"""Eight virtual devices give what one gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.ported import plan_of
from tests.tolerances import TOLERANCES
from tpuport.errors import MeshError

ATOL = TOLERANCES["mesh float32"]
SHAPE = {"height": 48, "width": 64, "num_frames": 9, "num_inference_steps": 2}


def run(folder: Path, cache: Path, mesh: Any, prompts: list[str]) -> dict[str, Any]:
    """Embeddings, latents and frames on a mesh."""
    with tpuport.load(weights=folder, mesh=mesh, cache_dir=cache) as session:
        request = session.request(prompt=prompts, seed=1, **SHAPE)
        embeds, encoded = session.run_stage("encode", request, {})
        latents, denoised = session.run_stage("denoise", request, embeds)
        frames, _ = session.run_stage("decode", request, latents)
    plans = {p["component"]: p for r in (encoded, denoised) for p in r.sharding}
    return {**embeds, **latents, **frames, "plans": plans, "report": denoised}


@pytest.fixture(scope="module")
def single(checkpoints: Callable[[str], Path], cache: Path) -> Callable[..., Any]:
    made: dict[tuple[str, int], dict[str, Any]] = {}

    def get(form: str, count: int) -> dict[str, Any]:
        if (form, count) not in made:
            made[form, count] = run(
                checkpoints(form), cache, (1, 1, 1), ["a red fox"] * count
            )
        return made[form, count]

    return get


#: All axes, and tokens in uneven parts; ``test_native.py`` has both of every form.
KEPT = (("2b", (2, 2, 2), 1), ("1.5-5b", (1, 3, 1), 1))
SWEEP = (
    *(((2, 1, 4), 1), ((1, 1, 8), 1), ((2, 2, 2), 1), ((1, 3, 1), 1)),
    *(((1, 5, 1), 1), ((1, 8, 1), 1), ((8, 1, 1), 4)),
)


@pytest.mark.parametrize(
    ("form", "mesh", "videos"),
    [
        *KEPT,
        *(
            pytest.param(form, *case, marks=pytest.mark.sweep)
            for form in ("2b", "1.5-5b")
            for case in SWEEP
            if (form, *case) not in KEPT
        ),
    ],
)
def test_a_mesh_gives_what_one_device_gives(
    form: str,
    mesh: tuple[int, int, int],
    videos: int,
    single: Callable[..., Any],
    checkpoints: Callable[[str], Path],
    cache: Path,
) -> None:
    one = single(form, videos)
    many = run(checkpoints(form), cache, mesh, ["a red fox"] * videos)
    for name in ("prompt_embeds", "negative_prompt_embeds", "latents", "frames"):
        difference = np.asarray(many[name]) - np.asarray(one[name])
        assert np.abs(difference).max() <= ATOL, name
    tp = mesh[2]
    plan = many["plans"]["transformer"]
    if tp > 1:
        # Nearly all bytes are split; what is left whole are norms and embeddings.
        assert plan["bytes_per_device"] < plan["total_bytes"] * (1 / tp + 0.1)
    split = many["report"].attention[0]["split"]
    expected = ("dp", "tp", "sp", None)
    sizes = (*mesh[:1], mesh[2], mesh[1], 1)
    assert tuple(split) == tuple(
        a if n > 1 else None for a, n in zip(expected, sizes, strict=True)
    )


def test_a_mesh_that_does_not_divide_the_heads(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    with pytest.raises(
        MeshError, match=r"tp=3 does not divide.*tp values: 1, 2.*any degree"
    ):
        tpuport.load(weights=checkpoints("5b"), mesh="tp=3", cache_dir=cache)


def test_a_mesh_that_does_not_divide_the_batch(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    with (
        tpuport.load(
            weights=checkpoints("5b"), mesh="dp=8", cache_dir=cache
        ) as session,
        pytest.raises(MeshError, match=r"2 rows for 1 video.*legal dp values: 1, 2"),
    ):
        session.generate("a fox", **SHAPE)


def test_a_mesh_larger_than_the_machine(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    with pytest.raises(MeshError, match="needs 16 devices"):
        tpuport.load(weights=checkpoints("5b"), mesh="dp=2,tp=8", cache_dir=cache)


@torch.no_grad()
def test_a_bare_module_on_a_mesh() -> None:
    from tests.models.cogvideox.test_components import transformer_inputs
    from tests.models.conftest import make_transformer

    module = make_transformer("5b")
    inputs = transformer_inputs("5b", 2)
    ours = tpuport.port(module, mesh="dp=2,tp=4")
    difference = ours(**inputs).sample - module(**inputs).sample
    assert float(difference.abs().max()) <= ATOL
    assert plan_of(ours).bytes_per_device < plan_of(ours).total_bytes / 2
