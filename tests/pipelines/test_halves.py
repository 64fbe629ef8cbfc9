"""bfloat16: what upstream keeps in float32 stays in float32 on the devices.

Each pipeline is run three times for the transformer's dtypes, so a case takes more than
10 s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.pipelines.example import all_examples, made, run
from tpuport.core.seam.ported import seam_of


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("WanPipeline", marks=pytest.mark.slow),
        "CosmosTextToWorldPipeline",
        pytest.param("Kandinsky5T2VPipeline", marks=pytest.mark.slow),
    ],
)
def test_a_port_keeps_the_dtypes_of_upstreams_weights(
    name: str, tmp_path: Path
) -> None:
    pipeline, call = made(all_examples()[name])
    whole = run(pipeline, call)[0]
    pipeline.transformer.save_pretrained(tmp_path)
    half = type(pipeline.transformer).from_pretrained(
        tmp_path, torch_dtype=torch.bfloat16
    )
    wanted = {key: str(value.dtype)[6:] for key, value in half.state_dict().items()}
    assert {*wanted.values()} == {"float32", "bfloat16"}
    pipeline.register_modules(transformer=half)
    pipeline.text_encoder.to(torch.bfloat16)
    expected = run(pipeline, call)[0]
    # Equal embeddings: Wan's small net makes 0.054 of a text that is 0.004 off, more
    # than the transformer's rounding of 0.015; the next test has text encoders.
    with tpuport.ported(pipeline, mesh="dp=2,sp=2", on_host=["text_encoder"]):
        found = run(pipeline, call)[0]
        entry = seam_of(pipeline).entries["transformer"]
        assert entry._weights is not None
        assert entry._ported is not None
        placed = {
            member: str(entry._weights[array].dtype)
            for array, members in entry._ported.arrays.items()
            for member in members
        }
    assert {key: placed[key] for key in wanted} == wanted
    rounding = np.sqrt(np.mean((expected - whole) ** 2))
    # As far from float32 as upstream is, in another direction; measured up to 1.03 and
    # 1.33 of upstream's distance.
    assert 0 < np.sqrt(np.mean((found - whole) ** 2)) < 1.5 * rounding
    assert np.sqrt(np.mean((found - expected) ** 2)) < 1.5 * rounding


@pytest.mark.parametrize(
    "name",
    ["WanPipeline", "CosmosTextToWorldPipeline", "Kandinsky5T2VPipeline"],
)
def test_a_ported_text_encoder_is_as_near_to_float32_as_upstreams(name: str) -> None:
    pipeline, call = made(all_examples()[name])
    module = pipeline.text_encoder
    asked = first_call(module, lambda: run(pipeline, call))
    whole = asked(module)
    module.to(torch.bfloat16)
    rounding = rms(asked(module) - whole)
    for mesh in ("dp=1", "dp=2", "sp=2", "dp=2,sp=2"):
        found = asked(tpuport.port(module, mesh=mesh, progress=False))
        # Two independent roundings; measured 0.83 to 0.98 of upstream's.
        assert 0 < rms(found - whole) < 1.1 * rounding, mesh


def first_call(
    module: torch.nn.Module, run: Callable[[], Any]
) -> Callable[[torch.nn.Module], torch.Tensor]:
    """The first call of ``module`` in a run: on a module, it gives the first output."""
    calls: list[tuple[Any, Any]] = []
    noting = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    run()
    noting.remove()
    args, kwargs = calls[0]

    def asked(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = module(*args, **kwargs)[0].float()
        return result

    return asked


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
