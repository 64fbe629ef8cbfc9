"""Imports go one way, and the other rules of the house that a walk can check."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Layers, lowest first. A module imports from its own layer and those below.
LAYERS = (
    ("errors",),
    ("kernels",),
    ("core",),
    ("hookspecs", "patches"),
    ("plugin",),
    ("models",),
    ("plugins",),
    ("targets",),
    ("api",),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Rooms of a layer, lowest first; those of one tuple do not import each other. The hall
#: is the files of the layer's own folder.
HALL = "hall"
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kernels": ((HALL,), ("attention", "convolution", "norms", "products")),
    "core": (
        (HALL,),
        ("mesh",),
        ("files",),
        ("tracing",),
        ("space",),
        ("layers",),
        ("weights",),
        ("spec",),
        ("programs",),
        ("pipelines",),
        ("seam",),
        ("drive",),
        ("preview",),
        ("run",),
        ("cost",),
        ("plan",),
    ),
    "cli": (
        ("shown",),
        ("asked",),
        ("runs",),
        ("batches",),
        ("server",),
        ("commands",),
        (HALL,),
    ),
}
#: Rooms that import less than their place allows.
ONLY = {"cost": {HALL, "mesh", "files", "tracing", "cost"}}
MOST_IN_A_ROOM, MOST_IN_A_HALL = 15, 4

#: Slow to import, so never while `tpuport --help` runs.
HEAVY = {
    "accelerate",
    "diffusers",
    "flax",
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

    @functools.cache  # noqa: B019  (the sources live as long as the process)
    def imports(self) -> tuple[Import, ...]:
        """Every import, also inside functions; relative ones by their full name."""
        package = self.name if self.path.name == "__init__.py" else self.parent
        return tuple(_imports(self.tree, package, True, False))

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
BY_NAME = {source.name: source for source in SOURCES}


def where(source: Source, line: int) -> str:
    return f"{source.path.relative_to(ROOT)}:{line}"


def room_of(name: str) -> tuple[str, str] | None:
    """(layer, room) of a module; ``None`` for a layer without rooms."""
    parts = name.split(".")
    if len(parts) < 2 or parts[1] not in ROOMS:
        return None
    rooms = {room for level in ROOMS[parts[1]] for room in level}
    inside = len(parts) > 2 and parts[2] in rooms
    return parts[1], parts[2] if inside else HALL


def module_of(name: str) -> str | None:
    """The module that an imported name is in; ``None`` for other packages."""
    for candidate in (name, name.rpartition(".")[0]):
        if candidate in BY_NAME:
            return candidate
    return None


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
            if layer is not None and LEVEL[layer] > LEVEL[source.layer]:
                wrong.append(f"{where(source, found.line)} imports {found.name}")
    assert wrong == []


def upward(source: Source, found: Import) -> bool:
    """Whether an import goes to a room that the importing one may not know."""
    here, there = room_of(source.name), room_of(found.name)
    if here is None or there is None or here[0] != there[0] or here == there:
        return False
    level = {room: n for n, rooms in enumerate(ROOMS[here[0]]) for room in rooms}
    if there[1] not in ONLY.get(here[1], level):
        return True
    return level[there[1]] >= level[here[1]]


def test_rooms_import_one_way() -> None:
    wrong = [
        f"{where(source, found.line)} imports {found.name}"
        for source in SOURCES
        for found in source.imports()
        if upward(source, found)
    ]
    assert wrong == []


def circles(arrows: Mapping[str, set[str]]) -> list[str]:
    """The modules that are left when all that import nothing left are taken away."""
    left = {name: set(targets) for name, targets in arrows.items()}
    while free := {name for name, targets in left.items() if not targets & set(left)}:
        left = {name: targets for name, targets in left.items() if name not in free}
    return sorted(left)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports in functions and those for types count as well."""
    arrows: dict[str, set[str]] = {}
    for source in SOURCES:
        found = {module_of(i.name) for i in source.imports()} - {None, source.name}
        arrows[source.name] = {name for name in found if name is not None}
    assert circles(arrows) == []


def folders() -> dict[Path, list[Path]]:
    """The files of every folder of the package, without its ``__init__``."""
    found: dict[Path, list[Path]] = {}
    for source in SOURCES:
        files = found.setdefault(source.path.parent, [])
        if source.path.name != "__init__.py":
            files.append(source.path)
    return found


def test_rooms_are_small() -> None:
    halls = [ROOT / "cli", *(ROOT / "tpuport" / name for name in ("core", "kernels"))]
    halls += [ROOT / "tests", ROOT / "tests/core", ROOT / "tests/kernels"]
    sizes = {folder: len(files) for folder, files in folders().items()}
    sizes |= Counter(path.parent for path in ROOT.glob("tests/**/*.py"))
    models = ROOT / "tpuport/models"
    crowded = {
        str(folder.relative_to(ROOT)): size
        for folder, size in sizes.items()
        if size > (MOST_IN_A_HALL if folder in halls else MOST_IN_A_ROOM)
        and models not in folder.parents
    }
    assert crowded == {}


def test_each_room_says_what_belongs_there() -> None:
    missing = []
    for layer, levels in ROOMS.items():
        for room in (room for level in levels for room in level):
            name = f"tpuport.{layer}" + ("" if room == HALL else f".{room}")
            (package,) = (s for s in SOURCES if s.name == name)
            text = ast.get_docstring(package.tree) or ""
            words = (
                ("order of the rooms", "rooms:") if room == HALL else ("may import",)
            )
            if not any(word in text.lower() for word in words):
                missing.append(name)
    assert missing == []


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


#: What must start quickly: importing any of these imports no other module at its top
#: that needs torch or jax.
LIGHT_ROOMS = {("core", room) for room in (HALL, "mesh", "files", "spec")}
LIGHT_ROOMS |= {
    ("cli", room) for room in (HALL, "shown", "asked", "batches", "server", "commands")
}


def light() -> set[str]:
    """The modules that must start quickly, and what they import at the top."""

    def is_light(source: Source) -> bool:
        if source.layer == "patches":
            return False
        if source.layer == "models":  # a plugin names what needs torch or jax
            return source.name.endswith(".plugin")
        if source.layer in ROOMS:
            return room_of(source.name) in LIGHT_ROOMS
        return True

    found: set[str] = set()
    open_modules = [source.name for source in SOURCES if is_light(source)]
    while open_modules:
        name = open_modules.pop()
        if name not in found:
            found.add(name)
            open_modules += at_top(name)
    return found


def at_top(name: str) -> list[str]:
    """The modules of the package that a module imports when it is imported."""
    imports = (i for i in BY_NAME[name].imports() if i.at_module_level)
    modules = (module_of(i.name) for i in imports if not i.type_checking)
    return [module for module in modules if module is not None]


def test_nothing_heavy_is_imported_with_a_light_module() -> None:
    wrong = [
        f"{where(BY_NAME[name], found.line)} imports {found.name}"
        for name in sorted(light())
        for found in BY_NAME[name].imports()
        if found.at_module_level
        and not found.type_checking
        and found.name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_what_needs_torch_or_jax_anyway_imports_at_the_top() -> None:
    quick = light()
    wrong = [
        f"{where(source, found.line)} imports {found.name} in a function"
        for source in SOURCES
        if source.name not in quick
        for found in source.imports()
        if not found.at_module_level
        and (found.name.split(".")[0] in ("jax", "torch", "numpy", "tpuport"))
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
        if any(re.search(rf"(?<![a-z]){m}(?![a-z])", text.lower()) for m in MODELS)
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
    low = Source("tpuport.core.mesh.bad", ROOT / "bad.py", tree)
    for name, wrong in (
        ("tpuport.core.seam.seam.Seam", True),
        ("tpuport.core.mesh.chips.chip", False),
        ("tpuport.core.arrays.to_numpy", False),
        ("tpuport.errors.MeshError", False),
    ):
        assert upward(low, Import(name, 1, False, True)) is wrong
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}}) == ["a", "b", "c"]
    texts = [text for _, text in words(tree)]
    assert "environ" in texts
    assert "CogVideoX" in texts
    assert "About cogvideox." not in texts
