"""Outputs, weights and executables in a store: S3 as moto serves it.

Endpoint and credentials come from the environment alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.cli.tools import ASKED, UPSTREAM, Cli, forget_stores
from tpuport.cli.runs.video_run import VideoRun
from tpuport.core.files.stores import StorePath
from tpuport.errors import StoreError

BUCKET = StorePath("s3", "bucket")


def test_a_video_its_sidecar_and_the_report(
    cli: Cli, folder: Path, store: s3fs.S3FileSystem, tmp_path: Path
) -> None:
    def made(out: str, *more: str) -> Any:
        report = "s3://bucket/report.json"
        asked = ("generate", "--weights", folder, *UPSTREAM, "--out", out)
        return cli.good(*asked, "--report", report, *more)

    cli.good("generate", "--weights", folder, *UPSTREAM, "--out", "fox.gif")
    first = made("s3://bucket/videos/fox.gif")
    assert "wrote s3://bucket/videos/fox.gif" in first.err
    assert store.cat("bucket/videos/fox.gif") == (tmp_path / "fox.gif").read_bytes()
    assert b'"command": "generate"' in store.cat("bucket/report.json")
    second = made("s3://bucket/videos/fox.gif", "--seed", "1")
    assert "fox.gif is there (--overwrite replaces it)" in second.err
    assert sorted((BUCKET / "videos").files()) == [
        *("fox-2.gif", "fox-2.gif.json", "fox.gif", "fox.gif.json")
    ]
    made("s3://bucket/videos/fox.gif", "--seed", "1", "--overwrite")
    assert store.cat("bucket/videos/fox.gif") == store.cat("bucket/videos/fox-2.gif")
    made("s3://bucket/frames/")
    made("s3://bucket/frames/", "--frames", "1")
    assert len((BUCKET / "frames").files()) == 5
    made("s3://bucket/frames/", "--frames", "1", "--overwrite")
    assert list((BUCKET / "frames").files()) == ["frame-00000.png"]
    assert list((BUCKET / "frames-2").files()) == ["frame-00000.png"]


@pytest.mark.parametrize("broken", ["bucket", "credentials"])
def test_a_store_that_cannot_be_written_is_told_before_weights_are_read(
    broken: str,
    cli: Cli,
    folder: Path,
    store: s3fs.S3FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(VideoRun, "opened", loaded)
    out, said = "s3://none/fox.gif", "s3://none: cannot be written (FileNotFoundError"
    if broken == "credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        forget_stores()
        out, said = "s3://bucket/fox.gif", "s3://bucket: cannot be written ("
    asked = ("generate", "--weights", folder, *UPSTREAM)
    cli.refused(said, *asked, "--out", out, code=1)
    cli.refused(said, *asked, "--out", "fox.gif", "--report", out, code=1)
    cache = out.removesuffix("/fox.gif")
    cli.refused(said, *asked, "--out", "fox.gif", "--cache-dir", cache, code=1)


def test_an_upload_that_breaks_leaves_a_run_that_goes_on(
    cli: Cli,
    folder: Path,
    store: s3fs.S3FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("reset by peer")

    asked = ("generate", "--weights", folder, *UPSTREAM, "--checkpoint-every", "1")
    with monkeypatch.context() as broken:
        broken.setattr(s3fs.S3FileSystem, "put_file", breaks)
        forget_stores()  # what is made once keeps its methods
        ran = cli(*asked, "--out", "s3://bucket/fox.gif")
    forget_stores()
    assert ran.code == 1
    assert "s3://bucket/fox.gif: cannot be written (ConnectionResetError" in ran.err
    assert not BUCKET.files()
    (run,) = cli.good("runs", "--json").json["runs"]
    cli.good("resume", run["id"])
    assert sorted(BUCKET.files()) == ["fox.gif", "fox.gif.json"]


def test_weights_and_executables_are_fetched_once(
    cli: Cli, folder: Path, store: s3fs.S3FileSystem, tmp_path: Path
) -> None:
    """The programs of a run are compiled, which takes more than 10 s."""
    store.put(f"{folder}/", "bucket/wan/", recursive=True)
    weights = (
        "--weights",
        "s3://bucket/wan",
        "--cache-dir",
        tmp_path / "cache",
        *ASKED,
    )
    built = ("--executables", "s3://bucket/built")
    cli.refused(
        "s3://bucket/built does not exist", *("generate", *weights, *built), code=2
    )
    ran = cli.good("compile", *weights, "--out", "s3://bucket/built")
    assert "use them with --executables s3://bucket/built" in ran.err
    names = set((BUCKET / "built").files())
    assert "manifest.json" in names
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    first = cli.good("generate", *weights, *built, "--out", "a.gif")
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    again = cli.good("generate", *weights, *built, "--out", "b.gif")
    assert "downloading" not in again.err
    assert "was not there" not in first.err + again.err
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    (BUCKET / "built/fox.txt").write_bytes(b"")
    cli.refused("holds fox.txt", "compile", *weights, "--out", "s3://bucket/built")


def test_a_cache_in_a_store_serves_machines_that_share_no_disk(
    cli: Cli,
    folder: Path,
    store: s3fs.S3FileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The programs of a run are compiled, which takes more than 10 s."""
    refused, write = list[str](), StorePath.write_bytes

    def fails_twice(self: StorePath, data: bytes) -> None:
        if "compiled/xla" in self.key and len(refused) < 2:
            refused.append(self.key)
            raise StoreError(f"{self}: the bucket is full")
        write(self, data)

    monkeypatch.setattr(StorePath, "write_bytes", fails_twice)

    def made(machine: str) -> tuple[list[bool], str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        asked = ("generate", "--weights", folder, *ASKED, "--json")
        out = ("--out", f"{machine}.gif", "--cache-dir", "s3://bucket/cache")
        ran = cli.good(*asked, *out)
        programs = [
            one for stage in ran.json["report"]["stages"] for one in stage["compiles"]
        ]
        return [one["cached"] for one in programs], ran.err

    first, said = made("one")
    assert not any(first)
    assert said.count("the bucket is full") == 1
    assert "the bucket is full. What the store refuses is compiled" in said
    second, said = made("two")
    assert (second.count(False), len(second)) == (2, len(first))
    assert "full" not in said
    assert all(made("three")[0])
    assert (tmp_path / "one.gif").read_bytes() == (tmp_path / "two.gif").read_bytes()
    programs = [f for f in BUCKET.files() if f.startswith("cache/compiled/xla/")]
    assert len(programs) == len(first)
    assert (tmp_path / "two/tpuport").is_dir()
    assert not list(tmp_path.rglob("*-cache"))
