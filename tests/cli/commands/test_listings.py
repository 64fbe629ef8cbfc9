"""``models``, ``plugins`` and ``doctor``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.tools import Cli
from tpuport.cli.asked.environment import DEFAULT_MODEL
from tpuport.cli.commands import doctor
from tpuport.core.mesh import compiler_flags as libtpu_flags
from tpuport.core.mesh.compiler_flags import FLAGS, choose_flags
from tpuport.plugins import model_plugins


def test_models_lists_every_variant_with_its_defaults(cli: Cli) -> None:
    text, document = cli("models").out, cli("models", "--json").json
    for plugin in model_plugins():
        (model,) = (m for m in document["models"] if m["model"] == plugin.name)
        assert [v["variant"] for v in model["variants"]] == list(plugin.variants)
        assert model["pipelines"] == list(plugin.pipelines)
        for name, published in plugin.variants.items():
            told = [published.repo, published.title]
            told += [f"{key}={value}" for key, value in published.defaults.items()]
            rows = [x for x in text.splitlines() if x.split()[:1] == [name]]
            assert any(all(part in row for part in told) for row in rows)
            (entry,) = (v for v in model["variants"] if v["variant"] == name)
            assert entry["defaults"] == dict(published.defaults)
    assert text.count(", the default\n") == 1
    assert "  --vae: torchax, flax\n" in text
    assert re.search(f"^{DEFAULT_MODEL}: .*, the default$", text, re.MULTILINE)


def test_plugins_names_packages_and_modules(cli: Cli) -> None:
    text, document = cli("plugins").out, cli("plugins", "--json").json
    (entry,) = (p for p in document["plugins"] if p["model"] == "cogvideox")
    assert entry["module"] == "tpuport.models.cogvideox.plugin"
    assert entry["package"].startswith("tpuport ")
    assert entry["module"] in text


def test_doctor_examines_everything(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOW_DISK", 0)  # whatever disk the tests run on
    ran = cli("doctor", "--json")
    report = ran.json
    assert ran.code == 0
    assert report["problems"] == []
    assert {"python", "torch", "torchax", "jax", "diffusers"} <= set(report["versions"])
    assert report["torchax"]["imports"]
    assert report["devices"]["count"] == 8
    assert report["ffmpeg"]["version"]
    assert report["cache"]["folder"] == str(cache)
    assert report["cache"]["free_bytes"] > 0
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    ran = cli("doctor")
    assert ran.err.startswith("looking at the installation ...")
    text = ran.out
    for found in filter(None, report["versions"].values()):
        assert found in text
    assert "8 x cpu" in text
    assert "none found" in text


def test_doctor_lists_compiler_flags_of_all_chips_where_there_is_none(cli: Cli) -> None:
    found = cli("doctor", "--json").json["compiler_flags"]
    assert found["chip"] is None
    assert [flag["name"] for flag in found["flags"]] == [f.name for f in FLAGS]
    assert all(f["chips"] and f["effect"] and f["source"] for f in found["flags"])
    text = cli("doctor").out
    assert text.startswith("problems")
    assert "no TPU here; what they do is in --json" in text
    lines = {line.split()[1]: line for line in text.splitlines() if "on v" in line}
    for chip in ("v5e", "v5p", "v6e", "v7x"):
        flags = [flag.text for flag in choose_flags(chip).applied]
        assert flags
        assert all(flag in lines[chip] for flag in flags)


def test_doctor_shows_the_flags_of_the_chip_and_whose_they_are(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = choose_flags("v6e").applied[:2]
    yours = f"--{theirs.name}=0"
    chosen = choose_flags("v6e", [yours])
    monkeypatch.setattr(libtpu_flags, "flags_for", lambda device: chosen)
    found = cli("doctor", "--json").json["compiler_flags"]
    assert found["chip"] == "v6e"
    whose = {flag["name"]: flag["yours"] for flag in found["flags"]}
    assert whose[ours.name] is None
    assert whose[theirs.name] == yours
    text = cli("doctor").out
    assert f"{ours.text} ({', '.join(ours.stages)}): {ours.effect}" in text
    assert f"{yours}, yours, in place of {theirs.text}" in text


def test_doctor_reports_what_is_broken_and_goes_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ImportError("no module\nnamed x")

    monkeypatch.setattr(doctor, "_torchax", broken)
    monkeypatch.setattr(doctor, "LOW_DISK", 2**60)
    ran = cli.good("doctor", "--json")
    assert ran.json["torchax"] is None
    assert "torchax: ImportError: no module named x" in ran.json["problems"]
    assert any("free for" in problem for problem in ran.json["problems"])
    assert "named x" in cli("doctor").out
    Path("file").touch()
    for cache in ("file", "file/deep"):
        ran = cli("doctor", "--json", "--cache-dir", cache)
        _, problem, _ = ran.json["problems"]
        assert problem.startswith(f"--cache-dir {cache}: ")
        assert "file is not a folder; move it away" in problem


def test_doctor_works_before_there_is_a_cache_folder(cli: Cli, tmp_path: Path) -> None:
    ran = cli.good("doctor", "--json", "--cache-dir", tmp_path / "not" / "there")
    assert ran.json["cache"]["bytes"] == {"compiled": 0, "demo": 0, "runs": 0}
    assert not (tmp_path / "not").exists()
