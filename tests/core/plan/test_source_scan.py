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

MODULE = """
import torch
import torch.distributed as dist
import torch.nn as nn
from flash_attn import flash_attn_func
from torch.utils.cpp_extension import load_inline
from typing import Optional
from torch.cuda.amp import autocast  # torch.cuda

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
        x[:, :4] = y
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
    assert by_kind(found)["a shape that depends on values"] == 2


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
