"""The mesh that is chosen when none is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tests.core.heard import Heard
from tpuport import api
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.plugins import get_port

ROWS = {
    ("cogvideox", "5b"): 2,
    ("hunyuanvideo", "1.5-720p-t2v"): 2,
    ("hunyuanvideo", "1.5-720p-i2v-cfg-distilled"): 1,
    # The guidance of 13b is an input, not a second row.
    ("hunyuanvideo", "13b"): 1,
}


@pytest.mark.parametrize(("model", "variant"), ROWS)
def test_the_rows_of_a_variants_defaults(model: str, variant: str) -> None:
    port = get_port(model)
    chosen = port.variant(variant)
    found = api.default_rows(port.form_of(chosen), chosen)
    assert found == ROWS[model, variant]


@pytest.mark.parametrize("model", ["cogvideox", "hunyuanvideo"])
def test_without_guidance_there_is_one_row(model: str) -> None:
    port = get_port(model)
    name = {"cogvideox": "5b", "hunyuanvideo": "1.5-720p-t2v"}[model]
    chosen = port.variant(name)
    form = port.form_of(chosen)
    assert api.default_rows(form, chosen, 1.0) == 1
    assert api.default_rows(form, chosen, 5.0) == 2


class FakeDevice:
    """A device of a platform that is not the CPU."""

    platform = "tpu"


@pytest.mark.parametrize(("rows", "mesh"), [(2, (2, 1, 4)), (1, (1, 1, 8))])
def test_dp_is_used_where_there_is_a_pair_to_split(
    rows: int,
    mesh: tuple[int, int, int],
    hunyuanvideo_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tpuport.core.mesh import device_mesh as meshes

    made: list[MeshSpec] = []

    def build(spec: MeshSpec, devices: Any) -> Any:
        made.append(spec)

    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice()] * 8)
    monkeypatch.setattr(meshes, "place_mesh", build)
    checkpoint = Checkpoint(hunyuanvideo_folders["1.5"], "x")
    api.make_mesh(get_port("hunyuanvideo"), checkpoint, None, rows)
    assert made == [MeshSpec(dp=mesh[0], sp=mesh[1], tp=mesh[2])]


@pytest.mark.parametrize(
    ("asked", "platform", "told"),
    [
        ("tp=2", "tpu", ["mesh dp=1,sp=1,tp=2 takes 2 of 8 devices: 6 stay unused"]),
        ("tp=-1", "tpu", []),
        # Those of a CPU are the same processor however many there are.
        ("tp=2", "cpu", []),
    ],
)
def test_chips_that_stay_unused_are_told(
    asked: str, platform: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpuport.core.mesh import device_mesh as meshes

    monkeypatch.setattr(meshes, "place_mesh", lambda spec, devices: None)
    heard = Heard()
    devices: Any = [SimpleNamespace(platform=platform)] * 8
    checkpoint: Any = None  # it is asked for a default mesh alone
    api.make_mesh(
        get_port("cogvideox"), checkpoint, MeshSpec.parse(asked), 2, devices, heard
    )
    assert heard.lines == told
