"""What does not port is found by reading a source, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest

from tpuport.core.plan.source_scan import (
    UNREAD,
    behind_the_door,
    by_kind,
    scan,
    sources_in,
)
from tpuport.errors import UsageError
from tpuport.patches.standard import PATCHES

MODULE = """
import torch
import torch.distributed as dist
import torch.nn as nn
from flash_attn import flash_attn_func
from torch.utils.cpp_extension import load_inline
from typing import Optional
from torch.cuda.amp import autocast  # torch.cuda
import torch.cuda.amp as amp  # torch.cuda
from mylib import _C
import rope_cuda
from mylib.checks import is_cuda_here

kernels = torch.ops.mine


def helper(x, mask):
    return x[mask]  # boolean indexing


class Block(nn.Module):
    def __init__(self, n, mask):
        super().__init__()
        self.size = n.item()
        self.mask = mask[mask > 0]

    def forward(self, x, mask: Optional[mask] = None):
        x = x.cuda()  # .cuda()
        y = x.to("cuda:0")  # a CUDA device by name
        torch.cuda.synchronize()  # torch.cuda
        n = x.sum().item()  # values as a number
        if x.max() > 1:  # Python that depends on values
            x[x > 1] = 1  # a write by a mask, in place
        rows = torch.where(mask)  # a shape that depends on values
        kept = torch.nonzero(mask)  # a shape that depends on values
        dist.all_reduce(x)  # torch.distributed
        z = torch.ops.mine.kernel(x)  # an operator of its own
        both = torch.where(mask, x, y)
        x[:, :4] = y  # a write to slices, in place
        with autocast():  # torch.cuda
            x = x[(x > 0) & (x < 1)]  # boolean indexing
        positive = x > 0
        y = x[positive], x[torch.isnan(x)]  # boolean indexing
        y = x[self.keep_mask]  # boolean indexing
        positive = 3
        y = x[positive]
        z = kernels.other(x)  # an operator of its own
        y = torch.zeros(1, device=f"cuda:{0}")  # a CUDA device by name
        n = float(x.max())  # values as a number
        assert x.max() < 1  # Python that depends on values
        n = 1 if x.max() > 0 else 2  # Python that depends on values
        n = (
            x.mean()
            .abs()
            .item()  # values as a number
        )
        return torch.ops.aten.add(x, x[..., 0])

    def other(self, x: torch.Tensor, sizes, device="cuda"):  # a CUDA device by name
        n = float(x[0]), int(x.shape[0]), int(sizes[0])  # values as a number
        y = torch.roll(x, 1)
        n = int(y[0, 1] + 1)  # values as a number
        for i in range(x.max()):  # Python that depends on values
            pass
        for i in range(int(x.max())):  # values as a number
            pass
        y = _C.rope(x)  # an operator of its own
        y = rope_cuda.forward(x)  # an operator of its own
        y = is_cuda_here(x) or torch._C._get_tracing_state()
        x[:, 0].add_(3)  # a write to an indexed view, in place
        x[0].mul_(3)  # a write to an indexed view, in place
        self.layers[0].reset_()
        x[..., ::2] = y  # a write to slices, in place
        x[:, 0] += y  # a write to slices, in place
        x.transpose(0, 1).mul_(3)  # a write to a view, in place
        x.view(-1)[0] = 1  # a write to a view, in place
        x[1:].view(-1)[0] = 1  # a write to a reshaped slice, in place
        x[1:].t().zero_()  # a write to a view, in place
        x.t().reshape(-1).add_(1)  # a write to a view or a copy, in place
        sizes[0] = 1
        return x.repeat_interleave(2), x.repeat_interleave(sizes, output_size=9)


class Repeats(nn.Module):
    def forward(self, x, t, num_frames, repeats=2):
        x = torch.repeat_interleave(x, num_frames)
        x = x.repeat_interleave(repeats)
        x = x.repeat_interleave(t, output_size=9)
        torch.repeat_interleave(x, t, output_size=9)  # a shape that depends on values
        return x.repeat_interleave(t)  # a shape that depends on values


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _C.forward(x)  # an operator of its own


class Pipeline:
    def __call__(self, x, mask):
        if mask.any():
            return x[mask].cpu().numpy().item()
"""


def expected(text: str) -> set[tuple[int, str]]:
    """The comments of the source: line and kind."""
    found = {
        (number, line.partition("# ")[2])
        for number, line in enumerate(text.splitlines(), 1)
        if "# " in line
    }
    imports = {3: "torch.distributed", 5: "kernels of flash_attn"}
    return found | set(imports.items()) | {(6, "an extension in C++ or CUDA")}


def test_each_kind_is_found_where_it_is(tmp_path: Path) -> None:
    """Not in ``__init__``, which no program runs, and not in a pipeline's host code."""
    file = tmp_path / "module.py"
    file.write_text(MODULE)
    found = scan(file, {})
    assert {(one.line, one.kind) for one in found} == expected(MODULE)
    assert all(one.remedy and one.code for one in found)
    one = next(one for one in found if one.kind == "values as a number")
    assert one.within == "Block.forward"
    assert by_kind(found)["a shape that depends on values"] == 4


def test_the_patch_of_a_function_covers_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = Path(diffusers.__file__).parent / "models"
    file = models / "transformers/transformer_hunyuan_video15.py"
    module = "diffusers.models.transformers.transformer_hunyuan_video15"
    target = f"{module}:HunyuanVideo15Transformer3DModel.forward"
    found = scan(file, {target: "ours", f"{module}:Other.forward": "other"})
    assert {one.patch for one in found} == {"ours"}
    monkeypatch.chdir(file.parent)
    here = scan(Path(file.name), {target: "ours"})
    assert {one.patch for one in here} == {"ours"}
    assert {one.patch for one in scan(file, {target.replace("15:", "16:"): "x"})} == {
        ""
    }


@pytest.mark.parametrize(
    ("line", "patch"),
    [
        ("x[:, 0].add_(3)", "torchax-in-place-on-views"),
        ("x[..., ::2] = y", "torchax-slice-assignment-tensor"),
        ("x[1:].view(-1)[0] = y", "torchax-view-array"),
        ("x.t().add_(3)", "torchax-shared-memory-written"),
        ("x.flatten()[0] = y", ""),
    ],
)
def test_a_write_in_place_names_the_patch_that_lets_it_run(
    tmp_path: Path, line: str, patch: str
) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"def helper(x, y):\n    {line}\n")
    patches = {one.target: one.name for one in PATCHES}
    assert [one.patch for one in scan(file, patches)] == [patch]


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.py", ".venv/c.py", "d.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("x.cuda()\n")
    assert [file.name for file in sources_in(tmp_path)] == ["a.py", "b.py"]


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        sources_in(tmp_path / "none")
    with pytest.raises(UsageError, match="no Python file"):
        sources_in(tmp_path)
    book = tmp_path / "book.ipynb"
    book.write_text("{}")
    with pytest.raises(UsageError, match=r"book\.ipynb: is no Python file"):
        sources_in(book)


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (b"def (", {UNREAD}),
        (b"print 'x'", {UNREAD}),
        ("\ufeffx.cuda()".encode(), {".cuda()"}),
        ("# coding: latin-1\nx.cuda()  # \u00e9".encode("latin-1"), {".cuda()"}),
    ],
)
def test_sources_are_read_as_python_reads_them(
    tmp_path: Path, source: bytes, kinds: set[str]
) -> None:
    file = tmp_path / "source.py"
    file.write_bytes(source)
    assert {one.kind for one in scan(file, {})} == kinds


def test_what_a_plugin_takes_beside_its_door_is_found(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(
        "from tpuport import plugin\n"
        "from tpuport.plugin import Module\n"
        "import tpuport.core.arrays\n"
        "MODULE = Module(native='tpuport.core.layers.attention:X')\n"
        "OWN = Module(native='mine.native:X')\n"
        "arrays = importlib.import_module('tpuport.core.arrays')\n"
        "TEXT = 'tpuport is fast; see tpuport.core.arrays'\n"
    )
    assert [one.line for one in behind_the_door([file])] == [3, 4, 6]
