"""A wheel made from an sdist gives the command and the module outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and a wheel built from that sdist."""
    root = tmp_path_factory.mktemp("packaging")
    source = root / "source"
    # From a copy of what git tracks, so that nothing lying about can slip in.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    # With the build backend of this environment: no other one is made for it.
    build = ("build", "--no-isolation", "-o", str(root / "dist"))
    done = run(sys.executable, "-m", *build, cwd=source)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return root / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as pip does, without its dependencies."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    done = run(
        *(sys.executable, "-m", "pip"),
        *("--python", sys.executable),
        *("install", "--no-deps", "--target", str(site), str(wheel)),
        cwd=built,
    )
    if done.returncode != 0 and "No module named pip" in done.stderr:
        # make test sets up an environment without pip inside; python -m zipfile
        # unpacks a wheel as well, all but the script.
        done = run(
            *(sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)), cwd=built
        )
    assert done.returncode == 0, done.stderr
    return site


def test_the_sdist_holds_the_project(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "cli/__init__.py"):
        assert name in names


def test_the_module_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed)}
    where = run(
        *(sys.executable, "-c", "import tpuport.cli; print(tpuport.cli.__file__)"),
        cwd=tmp_path,
        **environment,
    )
    assert where.stdout.strip() == str(installed / "tpuport" / "cli" / "__init__.py")
    done = run(sys.executable, "-m", "tpuport", "models", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "cogvideox" in done.stdout
    # cli/ is packaged as tpuport.cli, not as a package of that general name.
    assert not (installed / "cli").exists()
    assert not (installed / "tests").exists()


def test_the_command_and_the_plugin_are_entry_points(installed: Path) -> None:
    (info,) = installed.glob("tpuport-*.dist-info")
    text = (info / "entry_points.txt").read_text()
    assert "tpuport = tpuport.cli:main" in text
    assert "cogvideox = tpuport.models.cogvideox.plugin" in text
    assert (info / "licenses" / "LICENSE").is_file()
    assert (installed / "tpuport" / "py.typed").is_file()
