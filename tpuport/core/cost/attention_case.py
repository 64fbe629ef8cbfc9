"""One attention call to be costed, as data, and the source a kernel is made of."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

from tpuport.core.mesh.chips import chip
from tpuport.errors import UsageError
from tpuport.kernels.attention.splash_blocks import (
    SplashBlocks,
    default_blocks,
    vmem_bytes,
    vmem_limit,
)

#: Our kernel, and the one of jax that it is compared with.
IMPLEMENTATIONS = ("tpuport", "jax")

#: Of a row of registers; tiles of every kernel are multiples of it.
_LANES = 128
_PACKAGE = Path(__file__).parents[2]
_KERNEL = "tpuport.kernels.attention.splash"
_TABLE = "tpuport.kernels.attention.block_table"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Tokens of a kernel's tiles; ``q`` queries meet ``kv`` keys, some at a time."""

    q: int
    kv: int
    kv_compute: int

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """The tiles of ``Q/KV/COMPUTE``, such as ``2048/2048/512``.

        Raises:
            UsageError: it is not three positive numbers, or tiles that no kernel takes.
        """
        parts = text.split("/")
        if len(parts) != 3 or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise UsageError(
                f"--blocks {text!r} are not Q/KV/COMPUTE, such as 2048/2048/512, or "
                "auto"
            )
        q, kv, kv_compute = map(int, parts)
        if q % _LANES or kv % _LANES or kv_compute % _LANES or kv % kv_compute:
            raise UsageError(
                f"--blocks {text!r}: all three must be multiples of {_LANES}, and KV "
                "one of COMPUTE"
            )
        return cls(q=q, kv=kv, kv_compute=kv_compute)

    @classmethod
    def of(cls, tiles: SplashBlocks) -> Blocks:
        """The tiles of our kernel, as :class:`Blocks`."""
        return cls(q=tiles.q, kv=tiles.kv, kv_compute=tiles.kv_compute)

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}/{self.kv_compute}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """Full attention on one device: q [1, H, Lq, D], k and v [1, H, Lk, D].

    Attributes:
        implementation: ``tpuport`` or ``jax``.
        chip: generation, such as ``v6e``.
        heads: of this device alone.
        q_len, kv_len, head_dim: tokens and width.
        dtype: of q, k and v.
        blocks: tiles; None for what the implementation chooses.
    """

    implementation: str
    chip: str = "v6e"
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str = "bfloat16"
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise UsageError(
                f"--kernel {self.implementation!r}: is unknown; known are: "
                f"{', '.join(IMPLEMENTATIONS)}"
            )
        chip(self.chip)
        if self.dtype not in ("bfloat16", "float32"):
            raise UsageError(f"kernels take bfloat16 and float32, not {self.dtype}")
        for name in ("heads", "q_len", "kv_len", "head_dim"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {getattr(self, name)}: give at least 1")

    @property
    def scores(self) -> int:
        """Scores of the whole call, padding not counted: H Lq Lk."""
        return self.heads * self.q_len * self.kv_len

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2


def rule_blocks(case: AttentionCase) -> Blocks:
    """The tiles of tpuport's kernel by its own rule, without the table."""
    lengths = (case.q_len, case.kv_len, case.head_dim)
    return Blocks.of(default_blocks(*lengths, chip=case.chip, itemsize=case.itemsize))


def fits(case: AttentionCase, blocks: Blocks) -> bool:
    """Whether tpuport's kernel takes these tiles and they fit the chip's VMEM."""
    try:
        tiles = SplashBlocks(q=blocks.q, kv=blocks.kv, kv_compute=blocks.kv_compute)
    except ValueError:
        return False
    needed = vmem_bytes(tiles, case.head_dim, itemsize=case.itemsize)
    return needed <= vmem_limit(case.chip)


def kernel_source_hash() -> str:
    """Sha256 of the code that our splash kernel is made of.

    The hash covers the kernel's module and all modules it imports from
    ``tpuport.kernels``. Comments, docstrings, annotations and the place of a module do
    not count: none of them changes a kernel.

    Raises:
        UsageError: an imported module is missing.
    """
    found: dict[str, str] = {}
    open_modules = [_KERNEL]
    while open_modules:
        module = open_modules.pop()
        # Whoever measures the kernel writes the table, which is no part of the kernel.
        if module in found or module == _TABLE:
            continue
        path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        if not path.is_file():
            raise UsageError(f"{module} is missing")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = (
            n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
        )
        open_modules += [name for name in names if name.startswith("tpuport.kernels.")]
        found[module] = ast.dump(_code(tree))
    digest = hashlib.sha256()
    for module in sorted(found, key=lambda name: name.rpartition(".")[2]):
        digest.update(f"{module.rpartition('.')[2]}\0{found[module]}\0".encode())
    return digest.hexdigest()


def _code(tree: ast.Module) -> ast.Module:
    """A module without imports, docstrings and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                block[:] = [one for one in block if not _says_nothing(one)]
    return tree


def _says_nothing(node: ast.AST) -> bool:
    """An import, whose module counts by itself, or a text that nothing uses."""
    if isinstance(node, ast.Expr):
        return isinstance(getattr(node.value, "value", None), str)
    return isinstance(node, ast.Import | ast.ImportFrom)
