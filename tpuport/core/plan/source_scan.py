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

from tpuport.core.plan import source_words as words
from tpuport.errors import UsageError


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that does not port as it is.

    Attributes:
        file, line: where.
        kind: in a few words.
        code: the line.
        remedy: what to do.
        within: the function around, with its class.
        patch: a patch of tpuport that takes the function's place, or lets the line
            run; empty without.
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
        patch = patch or patches.get(words.COVERED.get(kind, ""), "")
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

    ``names`` has what a name stands for. The others have (function, name): ``masks``
    and ``tensors`` of those that one was assigned to, ``given`` of a forward's
    parameters without annotation, which may be tensors.
    """

    names: dict[str, str] = field(default_factory=dict)
    masks: set[tuple[str, str]] = field(default_factory=set)
    tensors: set[tuple[str, str]] = field(default_factory=set)
    given: set[tuple[str, str]] = field(default_factory=set)
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
                for default in _defaults(child):
                    if _names_cuda(default):
                        yield default, *words.CUDA_NAME, ".".join(inner)
                self._takes(child, ".".join(inner))
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
            is_tensor = self._is_tensor(node.value, within)
            (self.tensors.add if is_tensor else self.tensors.discard)((within, name))
            self.given.discard((within, name))
            full = self._full(node.value)
            if full.startswith("torch.ops."):
                self.names[name] = full
                self.aliases.add(name)
            elif name in self.aliases:
                self.aliases.discard(name)
                del self.names[name]

    def _takes(self, node: ast.FunctionDef | ast.AsyncFunctionDef, within: str) -> None:
        """Note which parameters are tensors, or may be."""
        arguments = node.args
        ordered = [*arguments.posonlyargs, *arguments.args]
        for one in (*ordered, *arguments.kwonlyargs):
            kind = ast.unparse(one.annotation) if one.annotation else ""
            if re.fullmatch(r"(Optional\[)?(torch\.)?Tensor\]?( \| None)?", kind):
                self.tensors.add((within, one.arg))
        if node.name != "forward":
            return
        bare = [one.arg for one in ordered if one.annotation is None]
        first = [one.arg for one in ordered if one.arg not in ("self", "ctx")][:1]
        self.tensors |= {(within, name) for name in first if name in bare}
        self.given |= {(within, name) for name in bare}

    def _is_tensor(self, node: ast.expr, within: str) -> bool:
        """Whether a value is surely a tensor."""
        if isinstance(node, ast.Name):
            return (within, node.id) in self.tensors
        if isinstance(node, ast.Subscript):
            return self._is_tensor(node.value, within)
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            return any(self._is_tensor(one, within) for one in sides)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        name = node.func.attr
        if name in words.NO_TENSORS or name.startswith("is_"):
            return False
        full = self._full(node.func)
        makes = re.fullmatch(r"torch(\.nn\.functional)?\.[a-z]\w*", full)
        return makes is not None or self._is_tensor(node.func.value, within)

    def _of(
        self, node: ast.expr | ast.stmt, within: str, *, traced: bool
    ) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from self._imported(node)
        elif isinstance(node, ast.Call):
            yield from self._called(node, traced=traced)
            if traced:
                yield from self._read(node, within)
        elif isinstance(node, ast.Attribute):
            if self._full(node).startswith("torch.cuda."):
                yield words.CUDA
        elif isinstance(node, ast.Subscript) and traced:
            yield from self._indexed(node, within)
        elif traced and _asks(_test_of(node)):
            yield words.BY_VALUES

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = f"{module}.{alias.name}".lstrip(".")
            self.names[alias.asname or alias.name.partition(".")[0]] = (
                full if module or alias.asname else alias.name.partition(".")[0]
            )
            package = full.partition(".")[0]
            relative = isinstance(node, ast.ImportFrom) and node.level
            if package in words.KERNELS and not relative:
                yield f"kernels of {package}", words.KERNELS[package]
            if full.startswith("torch.utils.cpp_extension"):
                yield "an extension in C++ or CUDA", "write the kernel in Pallas"
            if f"{full}.".startswith("torch.distributed."):
                yield words.DISTRIBUTED
            if f"{full}.".startswith("torch.cuda."):
                yield words.CUDA

    def _called(self, node: ast.Call, *, traced: bool) -> Iterator[tuple[str, str]]:
        full = self._full(node.func)
        name = full.rpartition(".")[2]
        method = isinstance(node.func, ast.Attribute)
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        values = [k.value for k in node.keywords]
        texts += [v.value for v in values if isinstance(v, ast.Constant)]
        for text in (*node.args, *values):
            if isinstance(text, ast.JoinedStr) and text.values:
                texts.append(getattr(text.values[0], "value", ""))
        if method and name == "cuda":
            yield ".cuda()", "leave it out: tpuport places tensors"
        elif any(isinstance(w, str) and w.split(":")[0] == "cuda" for w in texts):
            yield words.CUDA_NAME
        builds = "cpp_extension" in full and name in words.TO_BUILD
        if builds or full in words.REGISTERED:
            yield words.OWN, "write the kernel in Pallas"
        own = re.match(r"torch\.ops\.(?!(aten|prims)(\.|$))", full)
        if own or self._is_built(full):
            yield words.OWN, "write the kernel in Pallas, or patch the call"
        if full.startswith("torch.distributed."):
            yield words.DISTRIBUTED
        if full.startswith("torch.cuda.") and not method:
            yield words.CUDA
        if not traced:
            return
        if method and name in words.VALUES and not node.args:
            yield (
                f"values as {words.VALUES[name]}",
                "keep the tensor, or compute the value before forward",
            )
        if name in words.SHAPED_BY_VALUES and (method or full.startswith("torch.")):
            remedy = f"use {words.SHAPED_BY_VALUES[name]}"
            yield "a shape that depends on values", remedy
        if full == "torch.where" and len(node.args) == 1:
            yield "a shape that depends on values", "give torch.where three arguments"
        if name == "masked_scatter_" or (name == "index_put_" and method):
            yield words.BY_INDEX, "use torch.where or scatter"

    def _is_built(self, full: str) -> bool:
        """Whether a function is of an imported module that is built, by its name."""
        parts = full.split(".")
        known = any(f"{full}.".startswith(f"{one}.") for one in self.names.values())
        built = any(map(words.BUILT.fullmatch, parts[:-1]))
        return known and built and parts[0] not in words.OF_TORCH

    def _read(self, node: ast.Call, within: str) -> Iterator[tuple[str, str]]:
        """Calls that need values, and writes to views."""
        full, arguments = self._full(node.func), node.args
        values = any(_asks(a) or self._is_tensor(a, within) for a in arguments)
        if full in ("bool", "float", "int") and values:
            yield words.NUMBER
        if full == "range" and values and not any(map(_as_number, arguments)):
            yield words.BY_VALUES
        if not isinstance(node.func, ast.Attribute):
            return
        name, on = node.func.attr, node.func.value
        if name == "repeat_interleave":
            function = full.startswith("torch.")
            given = arguments[1:2] if function else arguments[:1]
            given += [k.value for k in node.keywords if k.arg == "repeats"]
            sized = any(k.arg == "output_size" for k in node.keywords)
            if (function or not sized) and any(
                self._may_be(one, within) for one in given
            ):
                yield "a shape that depends on values", "give the method output_size="
        if re.fullmatch(r"[a-z]\w*[a-z0-9]_", name) and name not in words.NO_WRITES:
            if viewed := _viewed(on):
                yield viewed
            elif _sliced(on) or (
                isinstance(on, ast.Subscript) and self._is_tensor(on.value, within)
            ):
                yield words.ON_INDEXED

    def _may_be(self, node: ast.expr, within: str) -> bool:
        """Whether a value is a tensor, or a parameter that may be one."""
        if self._is_tensor(node, within):
            return True
        given = isinstance(node, ast.Name) and (within, node.id) in self.given
        return given and not words.COUNT.fullmatch(ast.unparse(node))

    def _indexed(self, node: ast.Subscript, within: str) -> Iterator[tuple[str, str]]:
        if isinstance(node.value, ast.Name) and node.value.id in words.TYPES:
            return  # an annotation
        if isinstance(node.ctx, ast.Store):
            if viewed := _viewed(node.value):
                yield viewed
            elif _sliced(node):
                yield words.BY_SLICES
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
            return node.func.attr in words.MAKE_MASKS
        if isinstance(node, ast.Attribute):
            return node.attr.lower().endswith(words.MASKS)
        if not isinstance(node, ast.Name):
            return False
        named = any(word in node.id.lower() for word in words.MASKS)
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


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    yield from node.args.defaults
    yield from filter(None, node.args.kw_defaults)


def _names_cuda(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _as_number(node: ast.expr) -> bool:
    """Whether values are made a number inside, which is told by itself."""
    numbers = {"int", "float", "bool", "item", "tolist"}
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(ast.unparse(one).rpartition(".")[2] in numbers for one in calls)


def _viewed(node: ast.expr) -> tuple[str, str] | None:
    """The finding of a write to a view that a method made."""
    methods, indexed = [], False
    while True:
        if isinstance(node, ast.Subscript):
            node, indexed = node.value, True
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in words.VIEWS
        ):
            methods.append(node.func.attr)
            node, indexed = node.func.value, False
        else:
            break
    if not methods:
        return None
    if words.PERHAPS_COPIES & {*methods}:
        return words.TO_A_COPY
    return words.RESHAPED if indexed and {*methods} == {"view"} else words.BY_METHOD


def _sliced(node: ast.expr) -> bool:
    """Whether several dims are indexed, with slices among the indices."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    return any(
        isinstance(part, ast.Slice)
        or (isinstance(part, ast.Constant) and part.value is ...)
        for part in node.slice.elts
    )


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
        and node.func.attr in words.REDUCTIONS
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
