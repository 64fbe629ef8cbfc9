"""What in a source does not port, by reading it: file, line, remedy.

Nothing of the source is imported or run. A module's forward becomes a program: what
needs the values of tensors there, or CUDA, does not port as it is. Host code, such as a
pipeline's ``__call__``, may read values.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tpuport.errors import UsageError

#: Packages of CUDA kernels -> what runs in their place.
_KERNELS = {
    **dict.fromkeys(
        ("flash_attn", "xformers", "sageattention"),
        "call torch's scaled_dot_product_attention, which runs as splash",
    ),
    "flash_attn_interface": "call torch's scaled_dot_product_attention",
    "triton": "write the kernel in Pallas, or take torch's own operators",
    "apex": "take torch's own layer",
    "bitsandbytes": "load the weights in bfloat16",
    "deepspeed": "leave it out: the mesh splits the work",
}
_TO_BUILD = {"load_inline", "CUDAExtension", "CppExtension", "custom_op"}
#: Methods that hand a tensor's values to Python.
_VALUES = {
    "item": "a number",
    "tolist": "a list",
    "numpy": "an array",
    "cpu": "a tensor on the host",
}
#: Functions whose result has a shape that depends on values.
_SHAPED_BY_VALUES = {
    **dict.fromkeys(
        ("nonzero", "masked_select", "argwhere"), "torch.where with a mask of full size"
    ),
    **dict.fromkeys(
        ("unique", "unique_consecutive"), "a table that is made on the host"
    ),
    "bincount": "torch.nn.functional.one_hot and a sum",
}
_REDUCTIONS = {"any", "all", "sum", "max", "min", "mean", "equal", "allclose"}
_TYPES = {"Optional", "Union", "List", "Dict", "Tuple", "list", "dict", "tuple", "type"}
_MASKS = ("mask", "valid", "keep", "selected")
_DISTRIBUTED = "torch.distributed", "leave it out: the mesh splits the work"
_OWN = "an operator of its own"


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that does not port as it is.

    Attributes:
        file, line: where.
        kind: in a few words.
        code: the line.
        remedy: what to do.
        within: the function around, with its class.
        patch: a patch of tpuport that takes the function's place; empty without.
    """

    file: Path
    line: int
    kind: str
    code: str
    remedy: str
    within: str
    patch: str = ""

    def as_dict(self) -> dict[str, str | int]:
        """JSON-ready."""
        return {**asdict(self), "file": str(self.file)}


def sources_in(path: Path) -> list[Path]:
    """The Python files of a file or a folder, hidden folders left out.

    Raises:
        UsageError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: does not exist; name a Python file or a folder")
    found = sorted(
        file
        for file in path.rglob("*.py")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise UsageError(f"{path}: holds no Python file")
    return found


def scan(file: Path, patches: Mapping[str, str]) -> list[Finding]:
    """What in a file does not port.

    Args:
        patches: ``"package.module:Class.attr"`` -> the name of the patch.

    Raises:
        UsageError: it is no Python.
    """
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise UsageError(f"{file}: is no Python source ({error})") from error
    lines = text.splitlines()
    found = {}
    for node, kind, remedy, within in _Reader().read(tree):
        code = lines[node.lineno - 1].strip()
        patch = _covering(file, within, patches)
        key = (node.lineno, kind)
        found[key] = Finding(file, node.lineno, kind, code, remedy, within, patch)
    return sorted(found.values(), key=lambda one: one.line)


def _covering(file: Path, within: str, patches: Mapping[str, str]) -> str:
    """The patch whose target is the function that a line is in."""
    place = ".".join(file.with_suffix("").parts)
    for target, name in patches.items():
        module, _, path = target.partition(":")
        inside = within == path or within.startswith(f"{path}.")
        if inside and f".{place}".endswith(f".{module}"):
            return name
    return ""


_Found = tuple[ast.expr | ast.stmt, str, str, str]


@dataclass
class _Reader:
    """Reads a tree; knows the function that it is in."""

    names: dict[str, str] = field(default_factory=dict)

    def read(
        self, node: ast.AST, path: tuple[str, ...] = (), *, traced: bool = False
    ) -> Iterator[_Found]:
        for child in ast.iter_child_nodes(node):
            inner, traces = path, traced
            if isinstance(child, ast.ClassDef):
                inner, traces = (*path, child.name), _is_module(child)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (*path, child.name)
                # A function by itself may be called by a forward.
                traces = (traced and child.name != "__init__") or not path
            within = ".".join(inner)
            if isinstance(child, ast.expr | ast.stmt):
                for kind, remedy in self._of(child, traced=traces):
                    yield child, kind, remedy, within
            yield from self.read(child, inner, traced=traces)

    def _of(
        self, node: ast.expr | ast.stmt, *, traced: bool
    ) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from self._imported(node)
        elif isinstance(node, ast.Call):
            yield from self._called(node, traced=traced)
        elif isinstance(node, ast.Attribute):
            if self._full(node).startswith("torch.cuda."):
                yield "torch.cuda", "leave it out, or ask for it on CUDA alone"
        elif isinstance(node, ast.Subscript) and traced:
            yield from _indexed(node)
        elif isinstance(node, ast.If | ast.While) and traced and _asks(node.test):
            yield (
                "Python that depends on values",
                "use torch.where, or hand the answer in as an argument",
            )

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = f"{module}.{alias.name}".lstrip(".")
            self.names[alias.asname or alias.name.partition(".")[0]] = (
                full if module or alias.asname else alias.name.partition(".")[0]
            )
            package = full.partition(".")[0]
            relative = isinstance(node, ast.ImportFrom) and node.level
            if package in _KERNELS and not relative:
                yield f"kernels of {package}", _KERNELS[package]
            if full.startswith("torch.utils.cpp_extension"):
                yield "an extension in C++ or CUDA", "write the kernel in Pallas"
            if f"{full}.".startswith("torch.distributed."):
                yield _DISTRIBUTED

    def _called(self, node: ast.Call, *, traced: bool) -> Iterator[tuple[str, str]]:
        full = self._full(node.func)
        name = full.rpartition(".")[2]
        method = isinstance(node.func, ast.Attribute)
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        values = [k.value for k in node.keywords]
        words += [v.value for v in values if isinstance(v, ast.Constant)]
        if method and name == "cuda":
            yield ".cuda()", "leave it out: tpuport places tensors"
        elif any(isinstance(w, str) and w.split(":")[0] == "cuda" for w in words):
            yield "a CUDA device by name", "take the device of an argument"
        if name in _TO_BUILD and ("cpp_extension" in full or "library" in full):
            yield _OWN, "write the kernel in Pallas"
        if re.match(r"torch\.ops\.(?!(aten|prims)(\.|$))", full):
            yield _OWN, "write the kernel in Pallas, or patch the call"
        if full.startswith("torch.distributed."):
            yield _DISTRIBUTED
        if not traced:
            return
        if method and name in _VALUES and not node.args:
            yield (
                f"values as {_VALUES[name]}",
                "keep the tensor, or compute the value before forward",
            )
        if name in _SHAPED_BY_VALUES and (method or full.startswith("torch.")):
            yield "a shape that depends on values", f"use {_SHAPED_BY_VALUES[name]}"
        if full == "torch.where" and len(node.args) == 1:
            yield "a shape that depends on values", "give torch.where three arguments"
        if name == "masked_scatter_" or (name == "index_put_" and method):
            yield "a write by index, in place", "use torch.where or scatter"

    def _full(self, node: ast.AST) -> str:
        """``torch.cuda.synchronize`` of an expression; imported names in full."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._full(node.value)}.{node.attr}"
        return ""


def _is_module(node: ast.ClassDef) -> bool:
    """Whether a class has a forward, or is a module by the name of a base."""
    methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    named = any(base.endswith(("Module", "ModelMixin")) for base in bases)
    processor = node.name.endswith("Processor") or "AttnProcessor" in node.name
    return "forward" in methods or named or (processor and "__call__" in methods)


def _indexed(node: ast.Subscript) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, ast.Name) and node.value.id in _TYPES:
        return  # an annotation
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if not any(map(_is_mask, parts)):
        return
    if isinstance(node.ctx, ast.Store):
        yield "a write by a mask, in place", "use torch.where"
    else:
        yield "boolean indexing", "use torch.where with a mask of full size"


def _is_mask(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        tests = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq)
        return any(isinstance(op, tests) for op in node.ops)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "bool"
    return isinstance(node, ast.Name) and any(w in node.id.lower() for w in _MASKS)


def _asks(test: ast.expr) -> bool:
    """Whether a condition reduces a tensor."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _REDUCTIONS
        and ast.unparse(node.func.value) not in ("np", "numpy", "math")
        and not any(isinstance(a, ast.GeneratorExp) for a in node.args)
        for node in ast.walk(test)
    )


def by_kind(findings: Iterable[Finding]) -> dict[str, int]:
    """How often each kind was found, the most frequent first."""
    return dict(Counter(one.kind for one in findings).most_common())


#: What a plugin may import of tpuport.
DOOR = "tpuport.plugin"


def behind_the_door(files: Iterable[Path]) -> list[Finding]:
    """Imports of tpuport beside :mod:`tpuport.plugin`, which may move any day."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                module = "" if node.level else node.module or ""
                names = [f"tpuport.{n}" for n in names if module == "tpuport"]
                names = names or [module]
            found += [
                Finding(
                    file=file,
                    line=node.lineno,
                    kind="an import behind tpuport.plugin",
                    code=ast.unparse(node),
                    remedy=f"take the name from {DOOR}; nothing else is kept",
                    within="",
                )
                for name in names
                if name.partition(".")[0] == "tpuport" and name != DOOR
            ]
    return found
