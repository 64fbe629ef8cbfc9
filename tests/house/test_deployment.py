"""The Dockerfile and the Kubernetes example, without a builder and a cluster."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.cli.tools import call
from tpuport.cli.batches.cluster import hosts_of
from tpuport.core.mesh.slices import parse_topology

ROOT = Path(__file__).parents[2]
GKE = ROOT / "examples/gke"
SERVE, GENERATE = GKE / "serve.yaml", GKE / "generate.yaml"
#: The releases of Kubernetes that GKE offers, and one to come.
RELEASES = ("1.31", "1.33", "1.35")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each word in capitals and what follows."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    found = [line.partition(" ") for line in lines if line and line[0] != "#"]
    return [(word, " ".join(rest.split())) for word, _, rest in found]


def one_of(kind: str, file: Path = SERVE) -> dict[str, Any]:
    there = yaml.safe_load_all(file.read_text())
    (found,) = (one for one in there if one["kind"] == kind)
    return dict(found)


def pod(kind: str = "Deployment", file: Path = SERVE) -> dict[str, Any]:
    return dict(one_of(kind, file)["spec"]["template"]["spec"])


def test_the_dockerfile_copies_all_that_the_package_is_built_from(
    tmp_path: Path,
) -> None:
    """The wheel of what is copied has the files of the wheel of the checkout."""
    copied, whole = tmp_path / "copied", tmp_path / "whole"
    for word, rest in instructions():
        if word == "COPY":
            *names, target = rest.split()
            for name in names:
                source = ROOT / name
                place = copied / target
                if source.is_dir():
                    shutil.copytree(source, place, ignore=_not_cached)
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, place)
    assert {f"!{one.name}" for one in copied.iterdir()} == {
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    whole.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, whole)
    for name in ("tpuport", "cli"):
        shutil.copytree(ROOT / name, whole / name, ignore=_not_cached)
    assert wheel_of(copied) == wheel_of(whole)


def _not_cached(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__"}


def wheel_of(source: Path) -> set[str]:
    build = ("build", "--no-isolation", "--wheel", "-o", source / "dist")
    done = subprocess.run(
        [sys.executable, "-m", *build],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_dockerfile_names_what_there_is() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM"
    known = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "VOLUME", "EXPOSE"}
    assert set(words) <= known | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    said = dict(instructions())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [one for one in shlex.split(said["RUN"]) if one.startswith(".[")]
    assert set(extras[2:-1].split(",")) <= project["optional-dependencies"].keys()
    minor = said["FROM"].partition(":")[2].removesuffix("-slim")
    classifiers = project["classifiers"]
    assert f"Programming Language :: Python :: {minor}" in classifiers
    assert said["EXPOSE"] in said["HEALTHCHECK"]
    check_starts(json.loads(said["ENTRYPOINT"])[1:] + json.loads(said["CMD"]))


def check_starts(args: list[str]) -> None:
    """The command line is one that tpuport takes, up to the key file of the pod."""
    ran = call(*args)
    assert ran.code == 2
    assert "/keys/keys" in ran.last


@pytest.mark.parametrize("release", RELEASES)
def test_the_examples_are_valid_for_kubernetes(release: str) -> None:
    for file in GKE.glob("*.yaml"):
        for one in yaml.safe_load_all(file.read_text()):
            kubernetes_validate.validate(one, release, strict=True)
    wrong = one_of("Deployment")
    wrong["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, release, strict=True)


@pytest.mark.parametrize(
    ("file", "kind", "hosts"), [(SERVE, "Deployment", 1), (GENERATE, "Job", 4)]
)
def test_an_example_asks_for_one_slice_with_all_its_chips(
    file: Path, kind: str, hosts: int
) -> None:
    found = pod(kind, file)
    selector = found["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    y, x = map(int, selector["cloud.google.com/gke-tpu-topology"].split("x"))
    (container,) = found["containers"]
    for asked in container["resources"].values():
        assert int(asked["google.com/tpu"]) * hosts == y * x
    topology = parse_topology(f"v6e-{y * x}")
    assert topology.dims == (y, x)
    assert hosts_of(topology) == hosts


def test_the_hosts_of_a_slice_find_each_other() -> None:
    """GKE tells pods of each other that a headless service names."""
    job, service = one_of("Job", GENERATE), one_of("Service", GENERATE)
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod("Job", GENERATE)["subdomain"] == service["metadata"]["name"]
    (container,) = pod("Job", GENERATE)["containers"]
    ran = call(*container["args"])
    assert (ran.code, "--distributed: this is no Cloud TPU" in ran.last) == (2, True)


def test_the_parts_of_the_example_name_each_other() -> None:
    (container,) = pod()["containers"]
    check_starts(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--port={ports['http']}" in container["args"]
    probes = {
        name: container[f"{name}Probe"]["httpGet"]
        for name in ("startup", "liveness", "readiness")
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    paths = {name: probe["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    volumes = {one["name"]: one for one in pod()["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    env = dict(instructions())["ENV"]
    assert f"TPUPORT_CACHE_DIR={mounts['cache']}" in env
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == one_of("PersistentVolumeClaim")["metadata"]["name"]
    labels = one_of("Deployment")["spec"]["template"]["metadata"]["labels"]
    service = one_of("Service")["spec"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"][0]["targetPort"] == "http"
    said = (ROOT / "docs/serve.md").read_text()
    assert f"create secret generic {volumes['keys']['secret']['secretName']}" in said
