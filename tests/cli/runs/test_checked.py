"""``tpuport check`` and ``tpuport new-model``: from a class name to an exact port."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shown.test_plan_text import measured, plan_of
from tests.cli.tools import Cli, call
from tests.pipelines.example import all_examples, made, saved
from tpuport import hookspecs, plugins, targets
from tpuport.core.drive.compared import Compared
from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.plan import Plan
from tpuport.core.plan.source_scan import behind_the_door
from tpuport.core.seam.target import Target
from tpuport.errors import MeshError

EXAMPLE = Path(__file__).parents[3] / "docs/example"

#: A plugin that is not exact, and that looks behind the door.
WRONG = """
from tpuport import plugin
from tpuport.core.arrays import to_torch

def patches():
    def louder(upstream):
        return lambda self, x: upstream(self, x) * 1.01
    target = "models.normalization:RMSNorm.forward"
    return (plugin.diffusers_patch("louder", target, louder, "a test", wraps=True),)

@plugin.hookimpl
def tpuport_model():
    small = plugin.Published(configs="{configs}")
    return plugin.ModelPlugin(
        "wrong", "diffusers:LTXPipeline", patches=patches, variants={{"small": small}}
    )
"""


@pytest.fixture
def cli(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``tpuport`` in an empty folder; without the run that other tests share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache_dir))
    return call


Install = Callable[[Path, str, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a module of a folder an installed plugin."""

    def add(folder: Path, name: str, module: str) -> None:
        monkeypatch.syspath_prepend(str(folder))
        entry = metadata.EntryPoint(name, module, hookspecs.GROUP)
        found = {**plugins.installed_plugins(), **plugins.load_plugins([entry])}
        monkeypatch.setattr(plugins, "installed_plugins", lambda: found)

    return add


def test_the_example_is_exact_on_one_device_and_on_a_mesh(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder that is not installed. Over 10 s: compiled for three meshes."""
    blocks, claimed = [], targets.claimed_target

    def noted(*given: Any) -> Target:
        target = claimed(*given)
        blocks.append(target.blocks)
        return target

    monkeypatch.setattr(targets, "claimed_target", noted)
    ran = cli.good("check", EXAMPLE, "--no-plan", "--json")
    told = ran.json
    assert told["good"]
    assert blocks == [Blocks.NATIVE] * 4  # three meshes, and which patches run
    assert told["never_run"] == []
    assert told["imports"] == []
    meshes = ["one device", "dp=2,sp=2", "sp=2,tp=2"]
    assert [one["mesh"] for one in told["compared"]] == meshes
    assert told["compared"][0]["calls"].keys() == {
        *("text_encoder", "transformer", "vae.decode")
    }


def test_a_plugin_that_is_not_exact_is_told_where(
    cli: Cli, install: Install, tmp_path: Path
) -> None:
    """Over 10 s: as above, and parts one by one."""
    file = tmp_path / "wrong_plugin.py"
    file.write_text(WRONG.format(configs=EXAMPLE / "ltx_small.json"))
    install(tmp_path, "wrong", "wrong_plugin")
    ran = cli("check", "wrong", "--no-plan")
    assert ran.code == 1, ran.err
    part = "transformer.transformer_blocks.0.norm1 (RMSNorm)"
    assert "one device: differs: first transformer, by " in ran.out
    assert f", in {part}" in ran.out
    assert f"{file}:3: an import behind tpuport.plugin: " in ran.out


#: A package with several mistakes, of which none hides another.
MISTAKEN = """
from tpuport import plugin
{more}
GONE = plugin.diffusers_patch("gone", "models.normalization:RMSNorm.forwards", max, "x")
LOST = plugin.diffusers_patch("lost", "models.normalization:RMSNorm.losts", max, "x")
FORM = plugin.NativeForm(patches=(LOST,))

@plugin.hookimpl
def tpuport_model():
    small = plugin.Published(configs="small.json", defaults={{"num_framez": 9}})
    torn = plugin.Published("hub/id", configs="full.json")
    return plugin.ModelPlugin(
        "mistaken", "diffusers:LTXPipeline", patches=(GONE,),
        modules={{"vae": plugin.Module(forms={{"own": FORM}})}},
        variants={{"small": small, "full": torn}},
    )
"""


@pytest.fixture
def mistaken(tmp_path: Path) -> Path:
    """The package's plugin module."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "mistaken"\nversion = "1"\n'
        '[project.entry-points.tpuport]\nmistaken = "mistaken.plugin"\n'
    )
    package = tmp_path / "mistaken"
    package.mkdir()
    (package / "__init__.py").touch()
    text = (EXAMPLE / "ltx_small.json").read_text()
    (package / "small.json").write_text(text)
    (package / "full.json").write_text(text[:100])
    (package / "plugin.py").write_text(MISTAKEN.format(more=""))
    return package / "plugin.py"


def test_every_mistake_of_a_package_is_told(
    cli: Cli, tmp_path: Path, mistaken: Path
) -> None:
    ran = cli("check", ".", "--no-plan")
    assert ran.code == 1
    told = [line.strip() for line in ran.err.splitlines() if "plugin mistaken" in line]
    assert told[0] == (
        "error: plugin mistaken: variants['small']: defaults['num_framez'] is no "
        "parameter of LTXPipeline; did you mean num_frames?"
    )
    assert told[1].startswith(f"plugin mistaken: variants['full']: {mistaken.parent}")
    said = "plugin mistaken: 2 patches cannot be applied: 'gone' of "
    assert told[2].startswith(said)  # the other is of a form that --vae names
    assert "module vae's native form: " in ran.err
    assert len(told) == 3


def test_imports_are_told_of_a_package_that_does_not_load(
    cli: Cli, mistaken: Path
) -> None:
    more = "from tpuport.core.nowhere import gone"
    mistaken.write_text(MISTAKEN.format(more=more))
    ran = cli("check", ".", "--no-plan")
    assert ran.code == 1
    assert f"{mistaken}:3: an import behind tpuport.plugin: {more}" in ran.out
    assert "failed to import: ModuleNotFoundError" in ran.last


def test_a_patch_that_never_runs_is_told(
    cli: Cli, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of two patches the other is not."""
    from tpuport.cli.runs import checked

    monkeypatch.setattr(checked, "compare", lambda *_: [])
    text = WRONG.format(configs=EXAMPLE / "ltx_small.json")
    target = "models.normalization:SD35AdaLayerNormZeroX.forward"
    other = f'plugin.diffusers_patch("idle", "{target}", louder, "a", wraps=True)'
    text = text.replace("wraps=True),)", f"wraps=True), {other})")
    (tmp_path / "idle_plugin.py").write_text(text)
    install(tmp_path, "wrong", "idle_plugin")
    ran = cli("check", "wrong", "--no-plan", "--json")
    assert ran.json["never_run"] == ["idle"]


def test_a_folder_with_few_weights_runs_as_it_is(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpuport.cli.runs import checked

    monkeypatch.setattr(checked, "compare", lambda *_: [])
    monkeypatch.setattr(checked, "_MANY", 0)
    folder = saved(made(all_examples()["LTXPipeline"])[0], tmp_path / "ltx")
    ran = cli.good("check", folder, "--json")
    assert "of weights and may take minutes; --weights SMALL_FOLDER" in ran.err
    assert ran.json["weights"] == str(folder)
    assert ran.json["unplanned"].startswith("no configs of a full size")


def test_a_plan_that_is_refused_is_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the plan itself, which needs the compiler for TPUs."""
    from tpuport.cli.commands import check
    from tpuport.cli.runs import checked, planning

    def plan(*args: object) -> None:
        raise MeshError("too few heads")

    monkeypatch.setattr(checked, "compare", lambda *_: [])
    monkeypatch.setattr(check, "prepare_topology", lambda topology: None)
    monkeypatch.setattr(planning._One, "plan", plan)
    ran = cli("check", "wan", "--json")
    assert ran.code == 1, ran.err
    assert ran.json["unplanned"] == "too few heads"


def test_each_verdict_is_told_before_the_next_part_begins(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the size of the plan with its own."""
    from tpuport.cli.commands import check
    from tpuport.cli.runs import checked

    before: list[int] = []

    def began() -> None:
        before.append(sys.stdout.getvalue().count("\n"))  # type: ignore[attr-defined]

    def compared(*_: object) -> Iterator[Compared]:
        for mesh in ("one device", "dp=2,sp=2"):
            began()
            yield Compared(mesh=mesh, worst=0.0)

    def planned(*_: object, **__: object) -> Plan:
        began()
        return plan_of(MeshSpec(sp=8), measured(10, 0.5))

    monkeypatch.setattr(checked, "compare", compared)
    monkeypatch.setattr(checked, "losses", lambda _: [])
    monkeypatch.setattr(checked, "plan_run", planned)
    monkeypatch.setattr(check, "prepare_topology", lambda topology: None)
    ran = cli("check", "wan")
    assert before == [1, 2, 3]
    *verdicts, last = ran.out.splitlines()
    assert verdicts == [
        "WanPipeline, small, in float32 beside upstream's own code:",
        "  one device: equal, largest difference 0.0e+00",
        "  dp=2,sp=2: equal, largest difference 0.0e+00",
    ]
    size = "frames 33, height 128, width 256"
    assert last.startswith(f"planned for v6e-8, mesh dp=1,sp=8,tp=1, {size}: ")


def test_what_cannot_be_checked_is_refused(cli: Cli, tmp_path: Path) -> None:
    told = "'./nothing' is no plugin, no folder and no hub id; "
    cli.refused(told, "check", "./nothing", "--no-plan")
    (tmp_path / "empty").mkdir()
    told = "neither model_index.json, as a pipeline has, nor pyproject.toml"
    cli.refused(told, "check", "empty", "--no-plan")


@pytest.mark.parametrize("name", ["Wan", "CogVideoXImageToVideo", "Mochi"])
def test_a_class_name_makes_a_package(cli: Cli, name: str, tmp_path: Path) -> None:
    ran = cli.good("new-model", "my-model", "--class", f"{name}Pipeline", "--json")
    told, package = ran.json, tmp_path / "my-model/tpuport_my_model"
    assert {"linear", "convolution"} <= told["changes"].keys()
    text = (package / "plugin.py").read_text()
    assert text.count("FILL IN") == 4
    assert all(f"#   {change}: " in text for change in told["changes"])
    assert max(map(len, text.splitlines())) <= 88
    assert behind_the_door([package / "plugin.py"]) == []
    # Over all heads Wan has norms, and tp splits their weights; Mochi's are of a head.
    assert ('r"norm_[qk]\\.weight": ("tp",)' in text) == (name == "Wan")
    assert ('r"add_[qkv]_proj\\.weight": ("tp", None)' in text) == (name == "Mochi")
    full = json.loads((package / "full.json").read_text())
    assert full["model_index"]["_class_name"] == f"{name}Pipeline"


def test_the_test_of_a_new_package_is_green(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the comparison, which the example's own check makes.

    The command of the test runs in this process, where the comparison is left out.
    """
    from tpuport.cli.runs import checked

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "tpuport"]
        return subprocess.CompletedProcess(command, cli(*command[3:]).code)

    monkeypatch.setattr(checked, "compare", lambda *_: [])
    assert cli("new-model", "my-ltx", "--class", "LTXPipeline").code == 0
    test = tmp_path / "my-ltx/tests/test_my_ltx.py"
    assert behind_the_door([test]) == []
    monkeypatch.syspath_prepend(str(test.parent))
    monkeypatch.setattr(subprocess, "run", run)
    importlib.import_module("test_my_ltx").test_the_port_is_exact()
    sys.modules.pop("test_my_ltx")


def test_a_folder_stands_in_for_a_class_that_says_too_little(
    cli: Cli, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: its configs make the small pipeline again."""
    from tpuport.cli.runs import checked

    folder = saved(made(all_examples()["LTX2Pipeline"])[0], tmp_path / "ltx2")
    asked = ("new-model", "my-ltx2", "--class", "LTX2Pipeline")
    assert (
        "is of a LTX2Pipeline"
        in cli(
            *("new-model", "mine", "--class", "WanPipeline", "--weights", folder)
        ).last
    )
    cli.good(*asked, "--weights", folder)
    install(tmp_path / "my-ltx2", "my-ltx2", "tpuport_my_ltx2.plugin")
    monkeypatch.setattr(checked, "compare", lambda *_: [])
    cli.good("check", "my-ltx2", "--no-plan")


@pytest.mark.parametrize("kind", ["Image", "Video"])
def test_a_pipeline_that_begins_with_a_file_is_given_one(
    cli: Cli, kind: str, tmp_path: Path
) -> None:
    """Upstream has no default of the image, and ``None`` of the video.

    The positions of the first are learned; of the second's steps a share is run.
    """
    name = f"CogVideoX{kind}ToVideoPipeline"
    folder = saved(made(all_examples()[name])[0], tmp_path / "pipeline")
    asked = ("new-model", "mine", "--class", name, "--weights", folder)
    cli.good(*asked, "--option", "max_sequence_length=16")
    asked += ("--out", "other")
    assert (
        "sequence_length: 'x' is no int"
        in cli(*asked, "-o", "max_sequence_length=x").last
    )


def test_configs_that_upstream_does_not_run_are_told(cli: Cli) -> None:
    """Of the class itself: its chunks are those of 81 frames."""
    name = "AnyFlowFARPipeline"
    ran = cli("new-model", "mine", "--class", name)
    assert ran.code == 2
    said = f"the configs of the class {name} do not fit together (ValueError: "
    assert said in ran.last
    assert "; add --weights with the folder of a pipeline" in ran.last


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("My Model",), "a plugin may not be called 'My Model'"),
        (("cogvideox",), "is called 'cogvideox' already"),
        (("mine", "--class", "WanPipelin"), "did you mean WanPipeline?"),
        (("mine", "--class", "WanTransformer3DModel"), "is no pipeline of diffusers"),
        (("mine", "--out", "full"), "full is there and not empty"),
        (("mine", "--class", "MotifVideoPipeline"), "add --weights FOLDER"),
    ],
)
def test_a_package_that_cannot_be_is_refused_before_anything_is_written(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    given = (
        arguments if "--class" in arguments else (*arguments, "--class", "WanPipeline")
    )
    ran = cli("new-model", *given)
    assert ran.code == 2
    assert said in ran.last
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
