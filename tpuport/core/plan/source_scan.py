"""What in a source does not port, by reading it: file, line, remedy.

Nothing of the source is imported or run. A module's forward becomes a program: what
needs the values of tensors there, or CUDA, does not port as it is. Host code, such as a
pipeline's ``__call__``, may read values.
"""

from __future__ import annotations

import ast
import re
import tokenize
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
_TO_BUILD = {"load", "load_inline", "CUDAExtension", "CppExtension"}
_REGISTERED = {"torch.library.custom_op"}
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
#: Functions and methods whose result is a mask.
_MAKE_MASKS = {"bool", "isnan", "isinf", "isfinite", "isclose", "isin"}
_MAKE_MASKS |= {"gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "not_equal"}
_MAKE_MASKS |= {f"logical_{name}" for name in ("and", "or", "xor", "not")}
_DISTRIBUTED = "torch.distributed", "leave it out: the mesh splits the work"
_CUDA = "torch.cuda", "leave it out, or ask for it on CUDA alone"
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
        return {**asdict(self), "file": str(self.file)}


def sources_in(path: Path) -> list[Path]:
    """The Python files of a file or a folder, hidden folders left out.

    Raises:
        UsageError: there are none, or the file is another.
    """
    if path.is_file():
        if path.suffix not in (".py", ".pyi", ".pyw"):
            raise UsageError(f"{path}: is no Python file, by its name")
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


UNREAD = "not read: no source of Python 3"
"""The kind of the one finding of a file that is none."""


def scan(file: Path, patches: Mapping[str, str]) -> list[Finding]:
    """What in a file does not port; of a file that is no Python 3, :data:`UNREAD`.

    Args:
        patches: ``"package.module:Class.attr"`` -> the name of the patch.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with tokenize.open(file) as source:
            text = source.read()
        tree = ast.parse(text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    except (SyntaxError, ValueError) as error:
        line, what = (
            getattr(error, "lineno", None) or 1,
            getattr(error, "msg", str(error)),
        )
        return [Finding(file, line, UNREAD, what, "look at the file by hand", "")]
    lines = text.splitlines()
    found = {}
    for node, kind, remedy, within in _Reader().read(tree):
        line = _line_of(node)
        patch = _covering(file.resolve(), within, patches)
        code = lines[line - 1].strip()
        found[line, kind] = Finding(file, line, kind, code, remedy, within, patch)
    return sorted(found.values(), key=lambda one: one.line)


def _line_of(node: ast.expr | ast.stmt) -> int:
    """The line of a node; of a method's call, that of the method's name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.end_lineno or node.lineno
    return node.lineno


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
    """Reads a tree; knows the function that it is in.

    ``names`` has what a name stands for, ``masks`` (function, name) of those that a
    mask was assigned to.
    """

    names: dict[str, str] = field(default_factory=dict)
    masks: set[tuple[str, str]] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)

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
            if isinstance(child, ast.Assign):
                self._assigned(child, within)
            if isinstance(child, ast.expr | ast.stmt):
                for kind, remedy in self._of(child, within, traced=traces):
                    yield child, kind, remedy, within
            yield from self.read(child, inner, traced=traces)

    def _assigned(self, node: ast.Assign, within: str) -> None:
        names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        for name in names:
            self.masks.discard((within, name))
            if self._is_mask(node.value, within):
                self.masks.add((within, name))
            full = self._full(node.value)
            if full.startswith("torch.ops."):
                self.names[name] = full
                self.aliases.add(name)
            elif name in self.aliases:
                self.aliases.discard(name)
                del self.names[name]

    def _of(
        self, node: ast.expr | ast.stmt, within: str, *, traced: bool
    ) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from self._imported(node)
        elif isinstance(node, ast.Call):
            yield from self._called(node, traced=traced)
        elif isinstance(node, ast.Attribute):
            if self._full(node).startswith("torch.cuda."):
                yield _CUDA
        elif isinstance(node, ast.Subscript) and traced:
            yield from self._indexed(node, within)
        elif traced and _asks(_test_of(node)):
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
            if module and f"{full}.".startswith("torch.cuda."):
                yield _CUDA

    def _called(self, node: ast.Call, *, traced: bool) -> Iterator[tuple[str, str]]:
        full = self._full(node.func)
        name = full.rpartition(".")[2]
        method = isinstance(node.func, ast.Attribute)
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        values = [k.value for k in node.keywords]
        words += [v.value for v in values if isinstance(v, ast.Constant)]
        for text in (*node.args, *values):
            if isinstance(text, ast.JoinedStr) and text.values:
                words.append(getattr(text.values[0], "value", ""))
        if method and name == "cuda":
            yield ".cuda()", "leave it out: tpuport places tensors"
        elif any(isinstance(w, str) and w.split(":")[0] == "cuda" for w in words):
            yield "a CUDA device by name", "take the device of an argument"
        if ("cpp_extension" in full and name in _TO_BUILD) or full in _REGISTERED:
            yield _OWN, "write the kernel in Pallas"
        if re.match(r"torch\.ops\.(?!(aten|prims)(\.|$))", full):
            yield _OWN, "write the kernel in Pallas, or patch the call"
        if full.startswith("torch.distributed."):
            yield _DISTRIBUTED
        if full.startswith("torch.cuda.") and not method:
            yield _CUDA
        if not traced:
            return
        if full in ("bool", "float", "int") and any(map(_asks, node.args)):
            yield "values as a number", "keep the tensor"
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

    def _indexed(self, node: ast.Subscript, within: str) -> Iterator[tuple[str, str]]:
        if isinstance(node.value, ast.Name) and node.value.id in _TYPES:
            return  # an annotation
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not any(self._is_mask(part, within) for part in parts):
            return
        if isinstance(node.ctx, ast.Store):
            yield "a write by a mask, in place", "use torch.where"
        else:
            yield "boolean indexing", "use torch.where with a mask of full size"

    def _is_mask(self, node: ast.expr, within: str) -> bool:
        if isinstance(node, ast.Compare):
            tests = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq)
            return any(isinstance(op, tests) for op in node.ops)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Invert)
        if isinstance(node, ast.BinOp):
            both = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
            sides = (node.left, node.right)
            return both and any(self._is_mask(one, within) for one in sides)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _MAKE_MASKS
        if isinstance(node, ast.Attribute):
            return node.attr.lower().endswith(_MASKS)
        if not isinstance(node, ast.Name):
            return False
        named = any(word in node.id.lower() for word in _MASKS)
        return named or (within, node.id) in self.masks

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


def _test_of(node: ast.expr | ast.stmt) -> ast.expr | None:
    """What a node asks to go on by it."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return node.test
    return None


def _asks(test: ast.expr | None) -> bool:
    """Whether a condition reduces a tensor."""
    return test is not None and any(
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


def _imports_of(node: ast.AST) -> list[str]:
    """The modules that a node imports, or names in a text that is a path of one."""
    if isinstance(node, ast.ImportFrom):
        module = "" if node.level else node.module or ""
        names = [f"tpuport.{alias.name}" for alias in node.names]
        return names if module == "tpuport" else [module]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    text = node.value if isinstance(node, ast.Constant) else ""
    if isinstance(text, str) and re.fullmatch(r"tpuport(\.\w+)+(:\w+)?", text):
        return [text.partition(":")[0]]
    return []


def behind_the_door(files: Iterable[Path]) -> list[Finding]:
    """Imports of tpuport beside :mod:`tpuport.plugin`, which may move any day.

    Texts that name a module or an object of tpuport count as imports.
    """
    found = []
    for file in files:
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError):
            continue  # nothing imports such a file
        for node in ast.walk(tree):
            found += [
                Finding(
                    file=file,
                    line=getattr(node, "lineno", 1),
                    kind="an import behind tpuport.plugin",
                    code=ast.unparse(node),
                    remedy=f"take the name from {DOOR}; nothing else is kept",
                    within="",
                )
                for name in _imports_of(node)
                if name.partition(".")[0] == "tpuport" and name != DOOR
            ]
    return sorted(found, key=lambda one: (one.file, one.line))
