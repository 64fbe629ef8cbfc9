"""Programs split in space at the seam: upstream's numbers, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.core.heard import Heard
from tests.tolerances import TOLERANCES
from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.spatial_split import SpatialSplit
from tpuport.core.reports import Reporter
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.ported import port_module, seam_of
from tpuport.core.space import pictures as ways
from tpuport.core.spec.model_plugin import ModelPlugin, Module
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.sharding import DEFAULT_LAYOUT
from tpuport.errors import PluginError
from tpuport.targets import general_target, place_for_port

ATOL = TOLERANCES["mesh float32"]


def ported(module: torch.nn.Module, mesh: str, said: Reporter | None = None) -> Any:
    """The module as a plugin has it that declares the split, and nothing else."""
    names = {type(module).__name__: Module(split="space")}
    plugin = ModelPlugin("toy", "toys:Pipeline", modules=names)
    general = general_target(place_for_port(MeshSpec.parse(mesh)), RunSettings())
    target = general.of_plugin(plugin, Blocks.UPSTREAM, DEFAULT_LAYOUT)
    return port_module(module, target, said)


class Decoder(torch.nn.Module):
    """Enlarges twice, and keeps a frame at each resolution for the next chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Conv3d(4, 8, 3, padding=(0, 1, 1))
        self.norm = torch.nn.GroupNorm(2, 8)
        self.leave = torch.nn.Conv3d(8, 3, (2, 3, 3))

    def forward(
        self, z: torch.Tensor, cache: dict[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cache = cache or {"in": z[:, :, :1].repeat(1, 1, 2, 1, 1)}
        frames = torch.cat([cache["in"], z], dim=2)
        x = F.silu(self.norm(self.enter(frames)))
        x = F.interpolate(x, scale_factor=(1.0, 2.0, 2.0))
        last = cache.get("out", x[:, :, :1])
        y = F.pad(torch.cat([last, x], dim=2), (1, 1, 1, 1, 0, 0), mode="replicate")
        return self.leave(y), {"in": frames[:, :, -2:], "out": x[:, :, -1:]}


class Vae(torch.nn.Module):
    """Its loop is on the host, as upstream's."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.caches: list[Any] = []

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        cache, found = None, []
        for chunk in z.split(2, dim=2):
            made, cache = self.decoder(chunk, cache=cache)
            self.caches.append(cache)
            found.append(made)
        return torch.cat(found, dim=2)


class Encoder(torch.nn.Module):
    """Halves frames of a batch by a stride, and once more by rows in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Conv2d(3, 4, 3, stride=2)
        self.mix = torch.nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        videos, _, frames, *_ = x.shape
        x = x.transpose(1, 2).flatten(0, 1)
        x = self.down(F.pad(x, (0, 1, 0, 1)))
        if min(x.shape[-2:]) % 2 == 0:
            x = F.avg_pool2d(x, 2) + self.mix(F.pixel_unshuffle(x, 2))
        return x.unflatten(0, (videos, frames)).transpose(1, 2)


def frozen(module: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return module.eval().requires_grad_(False)


def latents(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def forced(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """That many devices for the rows and for the columns."""
    split = SpatialSplit(videos=1, rows=rows, columns=columns)
    monkeypatch.setattr(ways, "choose_split", lambda *sizes: split)


@pytest.mark.parametrize(
    ("mesh", "videos", "rows", "columns"),
    [
        ("sp=2", 1, 4, 6),
        ("sp=3", 1, 4, 7),
        ("sp=4", 2, 5, 3),
        ("dp=2,sp=2,tp=2", 1, 3, 17),
    ],
)
def test_a_loop_of_chunks_is_upstreams(
    mesh: str, videos: int, rows: int, columns: int
) -> None:
    vae = frozen(Vae())
    z = latents(videos, 4, 4, rows, columns)
    module = ported(vae, mesh)
    expected, found = vae.decode(z), module.decode(z)
    assert float((found - expected).abs().max()) <= ATOL
    assert float(expected.std()) > 100 * ATOL
    # Caches stay on the devices, in parts; read, they are upstream's.
    for mine, theirs in zip(module.caches, vae.caches, strict=True):
        for name, cache in mine.items():
            assert isinstance(cache, DeviceTensor)
            assert cache.family.host is None
            assert cache.shape == theirs[name].shape
            array = cache.on_devices
            parts = [part.data.shape for part in array.addressable_shards]
            assert len(parts) == eval(mesh.replace(",", "*").translate(_DIGITS))
            assert parts[0] != array.shape
            assert float((cache - theirs[name]).abs().max()) <= ATOL
    assert module.caches[0]["in"].on_devices.shape[-1] >= columns


_DIGITS = {ord(letter): None for letter in "dpst="}


def test_rows_and_columns_are_split_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, 2, 2)
    vae, z = frozen(Vae()), latents(1, 4, 4, 5, 7)
    module = ported(vae, "sp=2,tp=2")
    expected, found = vae.decode(z), module.decode(z)
    assert float((found - expected).abs().max()) <= ATOL
    assert module.caches[0]["out"].on_devices.shape[-2:] == (12, 16)
    assert module.caches[0]["out"].shape[-2:] == (10, 14)


@pytest.mark.parametrize(("rows", "columns"), [(16, 24), (20, 12), (10, 14), (9, 16)])
def test_rows_that_become_one_stay_together(rows: int, columns: int) -> None:
    # 10 x 14 are halved once, and 9 rows become 4: that picture is whole everywhere.
    encoder, x = frozen(Encoder()), latents(1, 3, 2, rows, columns)
    said = Heard()
    found, expected = ported(encoder, "sp=3", said)(x), encoder(x)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= ATOL
    whole = "a picture of 9 x 16 stays whole"
    assert any(whole in line for line in said.lines) == (rows == 9)


def test_a_small_picture_takes_some_of_the_devices() -> None:
    vae, said, z = frozen(Vae()), Heard(), latents(1, 4, 2, 2, 5)
    found = ported(vae, "sp=8", said).decode(z)
    assert float((found - vae.decode(z)).abs().max()) <= ATOL
    assert [line for line in said.lines if "2 x 5 has 4 parts" in line]


def test_a_border_wider_than_a_part_takes_fewer_devices() -> None:
    wide = frozen(torch.nn.Conv2d(4, 4, 7, padding=3))
    said, x = Heard(), latents(1, 4, 4, 8)
    found = ported(wide, "sp=4", said)(x)
    assert float((found - wide(x)).abs().max()) <= ATOL
    assert [line for line in said.lines if "4 x 8 has 2 parts" in line]


def test_a_cache_of_another_split_is_put_in_its_place() -> None:
    """Written on the host, or cut: the next program takes it all the same."""
    vae, z = frozen(Vae()), latents(1, 4, 2, 4, 9)
    module = ported(vae, "sp=3")

    def twice(vae: Any) -> Any:
        made, cache = vae.decoder(z)
        first = vae.decoder(z, cache)[0]
        cut = {name: one[..., :-1, :] + 0 for name, one in cache.items()}
        cut["out"] = cut["out"][..., :-1, :]
        return first + 0, vae.decoder(z[..., :-1, :], cut)[0], made

    for found, expected in zip(twice(module), twice(vae), strict=True):
        assert float((found - expected).abs().max()) <= ATOL


class Two(torch.nn.Module):
    """Two programs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.same = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.down = torch.nn.Conv2d(4, 4, 2, stride=2)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.same(x))


def test_programs_with_other_phantoms_hand_a_picture_on() -> None:
    # Ten columns are 3 a device, and 4 where pairs stay together.
    two, x = frozen(Two()), latents(1, 4, 4, 10)
    module = ported(two, "sp=4")
    assert float((module.decode(x) - two.decode(x)).abs().max()) <= ATOL
    given = [e.programs[0].inputs[0].shape for e in seam_of(module).entries.values()]
    assert given == [(1, 4, 4, 12), (1, 4, 4, 16)]


def test_other_shapes_among_the_inputs_are_refused_by_name() -> None:
    module = ported(frozen(Vae()), "sp=2")
    z = latents(1, 4, 2, 4, 6)
    cache = {"in": latents(1, 4, 2, 4, 7), "out": latents(1, 8, 1, 8, 12)}
    with pytest.raises(
        PluginError, match=r"given cache\['in'\] of shape .* argument 0"
    ):
        module.decoder(z, cache=cache)


def test_another_split_is_refused() -> None:
    with pytest.raises(PluginError, match=r"split='time': a module has 'space', or"):
        Module(split="time")


# What is not local in a picture, and no code of the port exchanges.


def attention(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    out = F.scaled_dot_product_attention(tokens, tokens, tokens)
    return out.transpose(1, 2).unflatten(2, x.shape[2:])


def mixed(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape[3:]
    return x.flatten(3).unflatten(3, (columns, rows)).transpose(3, 4)


def turned(x: torch.Tensor) -> torch.Tensor:
    weight = x.new_ones(4, 4, 1, 3, 3)
    return F.conv3d(x.transpose(3, 4), weight, padding=(0, 1, 1)).transpose(3, 4)


COLUMNS = "a reduction over columns"
NOT_LOCAL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "mean": (lambda x: x - x.mean(dim=(-2, -1), keepdim=True), COLUMNS),
    "attention": (attention, "a product that sums over|a reduction over"),
    "positions": (
        lambda x: x + torch.arange(x.shape[-1], device=x.device) / 100,
        "a device's part with an array that is whole",
    ),
    "fixed": (
        lambda x: F.interpolate(x, size=(2, 8, 24)),
        r"make \[1, 4, 2, 8, 48\], where upstream makes \[1, 4, 2, 8, 24\]",
    ),
    "mixed": (mixed, "a reshape cuts"),
    "cut": (lambda x: F.pad(x[..., 1:-1], (1, 1)), "takes some columns"),
    "beside": (
        lambda x: x + torch.roll(x, 1, dims=-1),
        "takes some columns|joins along columns",
    ),
    "turned": (turned, "dim is not the picture's columns"),
    "norm of tokens": (
        lambda x: F.group_norm(x.flatten(2), 2).unflatten(2, x.shape[2:]),
        "columns",
    ),
    "summed": (lambda x: x.cumsum(-1), "columns"),
    "number": (lambda x: x / x.abs().max(), COLUMNS),
}


class Plain(torch.nn.Module):
    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.does = does
        self.scale = torch.nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(x * self.scale)


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_what_is_not_local_is_refused_by_name(name: str) -> None:
    does, named = NOT_LOCAL[name]
    x = latents(1, 4, 2, 4, 12)
    with pytest.raises(PluginError, match=named) as refused:
        ported(Plain(does), "sp=2")(x)
    # Where the whole result is wrong, no single line is.
    assert name == "fixed" or "seam/test_space.py:" in str(refused.value)
