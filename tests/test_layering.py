"""Imports go one way, and the other rules of the house that a walk can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Lowest first. A module imports from its own layer and those below.
LAYERS = (
    ("errors", "hookspecs"),
    ("kernels",),
    ("core",),
    ("patches",),
    ("models",),
    ("plugins", "api"),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: (module, what it imports): against the order, with the reason.
ALLOWED = {
    # The type that a hook returns, under TYPE_CHECKING only; a test below checks that.
    ("tpuport.hookspecs", "tpuport.core.spec"),
}

#: Slow to import, so never while `tpuport --help` runs.
HEAVY = {
    "accelerate",
    "diffusers",
    "jax",
    "jaxlib",
    "safetensors",
    "torch",
    "torchax",
    "transformers",
}

MODELS = sorted(
    path.parent.name for path in (ROOT / "tpuport/models").glob("*/plugin.py")
)


@dataclass(frozen=True)
class Import:
    """One imported module, and where the statement stands."""

    name: str
    line: int
    at_module_level: bool
    type_checking: bool


@dataclass(frozen=True)
class Source:
    """A source file of the package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def layer(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def imports(self) -> Iterator[Import]:
        """Every import, also inside functions; relative ones by their full name."""
        package = self.name if self.path.name == "__init__.py" else self.parent
        yield from _imports(self.tree, package, True, False)

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def _imports(
    tree: ast.AST, package: str, at_module_level: bool, type_checking: bool
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(up if node.level else []), node.module or ""]).strip(".")
            # `from tpuport.core import x` may name a module or a value of one.
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(name, node.lineno, at_module_level, type_checking)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        yield from _imports(
            node, package, at_module_level and not in_function, type_checking or guard
        )


def sources() -> list[Source]:
    """All modules of the package; ``cli/`` is packaged as ``tpuport.cli``."""
    found = []
    for name, prefix in (("tpuport", "tpuport"), ("cli", "tpuport.cli")):
        folder = ROOT / name
        for path in sorted(folder.rglob("*.py")):
            parts = [prefix, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.append(Source(".".join(parts), path, tree))
    return found


SOURCES = sources()


def where(source: Source, line: int) -> str:
    return f"{source.path.relative_to(ROOT)}:{line}"


def layer_of(name: str) -> str | None:
    """The layer of an imported name, ``None`` for other packages and the root."""
    parts = name.split(".")
    if parts[0] != "tpuport" or len(parts) == 1:
        return None
    return parts[1] if parts[1] in LEVEL else None


def test_the_walk_sees_the_package() -> None:
    assert len(SOURCES) > 50
    assert MODELS
    imports = [i for source in SOURCES for i in source.imports()]
    assert any(i.type_checking for i in imports)
    assert any(not i.at_module_level for i in imports)


def test_every_module_is_in_a_layer() -> None:
    outside = {s.name for s in SOURCES if s.layer and s.layer not in LEVEL}
    assert outside == set()


def test_imports_go_one_way() -> None:
    wrong = []
    for source in SOURCES:
        if not source.layer:  # tpuport/__init__.py, the door to the api
            continue
        for found in source.imports():
            layer = layer_of(found.name)
            module = found.name.rpartition(".")[0]
            if layer is None or (source.name, module) in ALLOWED:
                continue
            if LEVEL[layer] > LEVEL[source.layer]:
                wrong.append(f"{where(source, found.line)} imports {found.name}")
    assert wrong == []


def test_hookspecs_import_the_core_for_types_only() -> None:
    (hookspecs,) = (s for s in SOURCES if s.name == "tpuport.hookspecs")
    core = [i for i in hookspecs.imports() if layer_of(i.name) == "core"]
    assert core
    assert all(i.type_checking for i in core)


def test_models_do_not_import_each_other() -> None:
    wrong = []
    for source in SOURCES:
        if source.layer != "models":
            continue
        own = source.name.split(".")[2:3]
        for found in source.imports():
            other = found.name.split(".")[2:3]
            if layer_of(found.name) == "models" and other != own:
                wrong.append(f"{where(source, found.line)} imports {found.name}")
    assert wrong == []


def test_kernels_are_jax_only() -> None:
    foreign = HEAVY - {"jax", "jaxlib"} | {"torch"}
    wrong = [
        f"{where(source, found.line)} imports {found.name}"
        for source in SOURCES
        if source.layer == "kernels"
        for found in source.imports()
        if found.name.split(".")[0] in foreign
    ]
    assert wrong == []


def test_nothing_heavy_is_imported_with_a_module() -> None:
    wrong = [
        f"{where(source, found.line)} imports {found.name}"
        for source in SOURCES
        if source.layer != "kernels"
        for found in source.imports()
        if found.at_module_level
        and not found.type_checking
        and (found.name.split(".")[0] in HEAVY or layer_of(found.name) == "kernels")
    ]
    assert wrong == []


def unchecked(tree: ast.Module) -> set[int]:
    """The ids of the strings that may name a model: documentation, DEFAULT_MODEL."""
    found = set()
    for node in ast.walk(tree):
        documents = isinstance(node, ast.Expr)
        if isinstance(node, ast.Assign):
            documents = ast.unparse(node.targets[0]) == "DEFAULT_MODEL"
        if documents:
            found.add(id(node.value))
    return found


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every name and every string that is not documentation."""
    skip = unchecked(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skip:
                yield line, node.value
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.alias | ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""


@pytest.mark.parametrize("layer", ["core", "kernels", "cli"])
def test_no_model_is_named_in(layer: str) -> None:
    """Except as the one value of a constant DEFAULT_MODEL."""
    wrong = [
        f"{where(source, line)}: {text!r}"
        for source in SOURCES
        if source.layer == layer
        for line, text in words(source.tree)
        if any(model in text.lower() for model in MODELS)
    ]
    assert wrong == []


def test_environment_variables_are_read_by_the_command_line_alone() -> None:
    wrong = [
        where(source, line)
        for source in SOURCES
        if source.layer != "cli"
        for line, text in words(source.tree)
        if text in ("environ", "getenv", "putenv", "environb")
    ]
    assert wrong == []


def test_each_rule_sees_a_breach_of_it() -> None:
    """The walk itself, on a file that breaks every rule."""
    tree = ast.parse(
        '"""About cogvideox."""\n'
        "import torch\n"
        "if TYPE_CHECKING:\n    import jax\n"
        "try:\n    from tpuport.api import load\nexcept ImportError:\n    pass\n"
        "def f():\n    import diffusers\n    return os.environ['CogVideoX']\n"
    )
    source = Source("tpuport.core.bad", ROOT / "bad.py", tree)
    found = {i.name: (i.at_module_level, i.type_checking) for i in source.imports()}
    assert found == {
        "torch": (True, False),
        "jax": (True, True),
        "tpuport.api.load": (True, False),
        "diffusers": (False, False),
    }
    texts = [text for _, text in words(tree)]
    assert "environ" in texts
    assert "CogVideoX" in texts
    assert "About cogvideox." not in texts
