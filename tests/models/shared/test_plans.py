"""Transformers with native blocks, compiled for the chips of a slice by ``plan``.

Published configs with two layers of a kind: every kernel, layout and exchange of a step
is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import needs_libtpu, run_python
from tpuport.core.pipelines.stand_in import write_configs
from tpuport.plugins import folder_of, get_model

TWO = {"num_layers": 2}
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "cogvideox": ("cogvideox", "1.5-5b", TWO, "dp=2,sp=4"),
    "hunyuanvideo": ("hunyuanvideo", "1.5-720p-t2v", TWO, "dp=2,sp=4"),
    "13b": ("hunyuanvideo-13b", "t2v", TWO | {"num_single_layers": 2}, "dp=1,sp=8"),
    "wan": ("wan", "2.1-t2v-1.3b", TWO, "dp=2,sp=4"),
}


@needs_libtpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "cogvideox" else pytest.mark.aot)
        for case in CASES
    ],
)
def test_a_step_compiles_from_the_projects_kernels(case: str, tmp_path: Path) -> None:
    """Over 10 s: the compiler for TPUs takes a transformer of full width."""
    model, variant, layers, mesh = CASES[case]
    plugin: Any = get_model(model)
    configs = dict(plugin.variants[variant].read(folder_of(model)))
    configs["transformer"] = {**configs["transformer"], **layers}
    folder = tmp_path / "configs"
    write_configs(folder, configs)
    asked = ("--topology", "v6e-8", "--size", "512x256", "--frames", "17")
    done = run_python(
        [
            "-m",
            "tpuport",
            "plan",
            "--weights",
            str(folder),
            *asked,
            "--stage",
            "denoise",
            "--json",
        ],
        environment=os.environ | {"TPUPORT_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["blocks"] == "native"
    assert ",".join(f"{k}={v}" for k, v in found["mesh"].items() if k != "tp") == mesh
    attention = [
        record
        for stage in found["stages"].values()
        for program in stage["programs"]
        if program["component"] == "transformer"
        for record in program["attention"]
    ]
    assert {record["implementation"] for record in attention} == {"splash"}, attention
    # Tokens are exchanged for heads; nothing is sent along a ring.
    kinds = {use["kind"] for use in found["collectives"] if use["axis"] == "sp"}
    assert "all-to-all" in kinds
    assert "collective-permute" not in kinds, found["collectives"]
    names = {kernel["name"] for kernel in found["kernels"]}
    assert {"tpuport_norm_tokens", "tpuport_norm_heads"} <= names
    assert found["seconds_per_step"] > 0
