"""bfloat16: what upstream keeps in float32 stays in float32 on the devices.

Each pipeline is run three times, so a case takes more than 10 s.
"""

from __future__ import annotations

from pathlib import Path

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
    # Equal embeddings: these small nets make much of the last bits of a text.
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
    # As far from float32 as upstream is, in another direction.
    rounding = np.sqrt(np.mean((expected - whole) ** 2))
    assert 0 < np.sqrt(np.mean((found - whole) ** 2)) < 1.5 * rounding
    assert np.sqrt(np.mean((found - expected) ** 2)) < 2 * rounding
