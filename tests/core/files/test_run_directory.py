"""The run directory: no file is used that is not the right one.

Every refusal is one line that names the file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.core.files.runs import (
    EMBEDDINGS,
    LATENTS,
    SETTINGS,
    denoise,
    encode,
    latents,
    refusal,
    request,
    rewrite,
)
from tpuport.core.files import fingerprint, run_directory
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGE_FILES
from tpuport.errors import UsageError


def interrupted(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_run_json_says_what_was_asked_for_and_what_is_finished(
    run: RunDirectory,
) -> None:
    encode(run)
    document = json.loads(run.file.read_text())
    assert document["schema"] == "tpuport.run"
    assert document["schema_version"] == 2
    assert (document["model"], document["variant"]) == ("toy", "small")
    assert document["settings"] == SETTINGS
    assert document["weights"] == {"encoder": "aa" * 32, "vae": None}
    entry = document["stages"]["encode"]
    assert entry["file"] == "embeddings.safetensors"
    assert entry["bytes"] == (run.path / entry["file"]).stat().st_size
    assert entry["tensors"]["prompt"] == {"shape": [2, 4, 8], "dtype": "bfloat16"}
    assert entry["report"] == run.report("encode") == {"s": 1.5}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["finished"])
    assert str(run.path) not in run.file.read_text()


def test_a_run_directory_works_where_it_was_copied_to(
    run: RunDirectory, tmp_path: Path
) -> None:
    encode(run)
    denoise(run)
    shutil.move(run.path, tmp_path / "elsewhere")
    moved = RunDirectory.open(tmp_path / "elsewhere")
    assert torch.equal(
        moved.read_stage("denoise", LATENTS)["latents"], latents()["latents"]
    )


def test_a_missing_folder_or_run_json_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no run"
    message = refusal(RunDirectory.open, missing)
    assert f"{missing}: the run directory does not exist" in message
    assert f"run `tpuport encode --run-dir '{missing}'` first" in message
    assert f"{tmp_path / 'run.json'}: is missing" in refusal(
        RunDirectory.open, tmp_path
    )
    file = tmp_path / "file"
    file.touch()
    assert f"{file}: the run directory is not a folder" in refusal(
        RunDirectory.open, file
    )


@pytest.mark.parametrize("content", [b"", b'{"schema": "tp', b"\xff\xfe", b"[" * 9999])
def test_a_run_json_that_is_not_json_is_refused(
    run: RunDirectory, content: bytes
) -> None:
    run.file.write_bytes(content)
    message = refusal(RunDirectory.open, run.path)
    assert message.startswith(f"{run.file}: is not JSON, or is cut short")


def test_every_truncation_of_run_json_is_refused(run: RunDirectory) -> None:
    whole = run.file.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        run.file.write_bytes(whole[:length])
        assert str(run.file) in refusal(RunDirectory.open, run.path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema": "other.run"}', "null"])
def test_another_schema_is_refused(run: RunDirectory, content: str) -> None:
    run.file.write_text(content)
    message = refusal(RunDirectory.open, run.path)
    assert re.search(
        r'run\.json: has schema .*, not "tpuport\.run"; start over', message
    )


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (0, "; start over"),
        (1, "; start over"),
        (3, "; update tpuport, or start over"),
        ("1", "; start"),
        (True, "; start"),
    ],
)
def test_another_schema_version_is_refused_with_both_versions(
    run: RunDirectory, version: Any, advice: str
) -> None:
    rewrite(run, lambda document: document.update(schema_version=version))
    message = refusal(RunDirectory.open, run.path)
    found = json.dumps(version)
    expected = f"run.json: has schema_version {found}, and this tpuport reads 2{advice}"
    assert expected in message


def test_a_hand_altered_run_json_is_refused(run: RunDirectory) -> None:
    rewrite(run, lambda d: d["settings"].update(steps=20), sign=False)
    message = refusal(RunDirectory.open, run.path)
    assert f"{run.file}: was altered after it was written" in message
    # Also by a process that opened it before.
    assert "was altered" in refusal(run.read_stage, "encode", EMBEDDINGS)


def test_a_value_that_json_does_not_have_is_an_alteration(run: RunDirectory) -> None:
    run.file.write_text(run.file.read_text().replace("50", "NaN", 1))
    assert "run.json: was altered" in refusal(RunDirectory.open, run.path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d.pop("stages"), "has no usable stages"),
        (
            lambda d: d["stages"].update(encode=1),
            "has no usable stages.encode (",
        ),
        (
            lambda d: d["stages"]["encode"].pop("sha256"),
            "has no usable stages.encode.sha256 (",
        ),
        (
            lambda d: d["stages"]["encode"].update(file="../../x"),
            "stages.encode.file names a file outside the run directory",
        ),
    ],
)
def test_a_run_json_of_the_wrong_form_is_refused(
    run: RunDirectory, change: Any, expected: str
) -> None:
    encode(run)
    rewrite(run, change)
    message = refusal(RunDirectory.open, run.path)
    assert message.startswith(f"{run.file}: {expected}")


def test_creating_over_stray_tensors_or_a_file_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").touch()
    assert f"{checkpoint / 'model.safetensors'}: is there without a run.json" in (
        refusal(RunDirectory.open_or_create, checkpoint, **request())
    )
    assert os.listdir(checkpoint) == ["model.safetensors"]
    file = tmp_path / "file"
    file.touch()
    assert f"{file}: cannot be made a run directory: is not a folder" in refusal(
        RunDirectory.open_or_create, file, **request()
    )


def test_settings_that_are_not_json_are_refused_before_the_folder_is_made(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="settings must be JSON"):
        RunDirectory.open_or_create(
            tmp_path / "run", **request(settings={"prompt": object()})
        )
    assert not (tmp_path / "run").exists()


def test_open_or_create_creates_once_and_checks_the_second_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep" / "run"
    RunDirectory.open_or_create(path, **request(weights={"vae": None}))
    RunDirectory.open_or_create(path, **request(weights={"vae": "bb" * 32}))
    assert "run.json" in refusal(
        RunDirectory.open_or_create, path, **request(weights={"vae": "cc" * 32})
    )
    assert "variant" in refusal(
        RunDirectory.open_or_create, path, **request(variant="large")
    )


# --- stages


@pytest.mark.parametrize("stage", ["encode", "denoise"])
def test_a_stage_that_is_not_finished_names_its_file_and_command(
    run: RunDirectory, stage: str
) -> None:
    message = refusal(run.read_stage, stage, LATENTS)
    assert str(run.path / STAGE_FILES[stage]) in message
    assert f"run `tpuport {stage} --run-dir {run.path}` first" in message
    assert not run.finished(stage)


def test_a_missing_file_is_refused(run: RunDirectory) -> None:
    encode(run)
    path = run.path / "embeddings.safetensors"
    path.unlink()
    message = refusal(run.read_stage, "encode", EMBEDDINGS)
    assert message == (
        f"{path}: is missing; run `tpuport encode --run-dir {run.path}` first"
    )
    assert not run.finished("encode")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "is cut short: "),
        (lambda data: b"", "is cut short: 0 bytes, run.json records "),
        (lambda data: data + b"\0", "has grown: "),
        (lambda data: data[:-1] + b"\x55", "is not the file run.json records"),
    ],
)
def test_a_truncated_or_altered_file_is_refused(
    run: RunDirectory, change: Any, expected: str
) -> None:
    encode(run)
    path = run.path / "embeddings.safetensors"
    path.write_bytes(change(path.read_bytes()))
    message = refusal(run.read_stage, "encode", EMBEDDINGS)
    assert message.startswith(f"{path}: {expected}")
    assert f"run `tpuport encode --run-dir {run.path}` again" in message
    assert not run.finished("encode")


def test_a_file_that_is_not_safetensors_is_refused(run: RunDirectory) -> None:
    encode(run)
    path = run.path / "embeddings.safetensors"
    path.write_bytes(b"\xff" * 40)
    sha256, size = hash_output(path)
    rewrite(run, lambda d: d["stages"]["encode"].update(sha256=sha256, bytes=size))
    message = refusal(run.read_stage, "encode", EMBEDDINGS)
    assert message.startswith(f"{path}: is not a safetensors file")


def test_latents_of_other_embeddings_are_refused(run: RunDirectory) -> None:
    encode(run)
    later = RunDirectory.open(run.path)  # another process
    later.read_stage("encode", EMBEDDINGS)
    denoise(later)
    run.read_stage("denoise", LATENTS)

    encode(run, 1.0)  # the same result again changes nothing
    assert run.finished("denoise")
    encode(run, 2.0)
    message = refusal(run.read_stage, "denoise", LATENTS)
    latents_file = run.path / "latents.safetensors"
    assert message.startswith(
        f"{latents_file}: was made from another embeddings.safetensors"
    )
    assert f"run `tpuport denoise --run-dir {run.path}` again" in message
    assert not run.finished("denoise")


def test_the_embeddings_recorded_are_those_read_not_those_there_at_the_end(
    run: RunDirectory,
) -> None:
    encode(run, 1.0)
    slow = RunDirectory.open(run.path)
    slow.read_stage("encode", EMBEDDINGS)
    encode(run, 2.0)  # while the slow process denoises
    denoise(slow)
    assert "another embeddings.safetensors" in refusal(
        run.read_stage, "denoise", LATENTS
    )


def test_the_inputs_of_a_stage_are_the_earlier_files_this_process_used(
    run: RunDirectory,
) -> None:
    def inputs(stage: str) -> list[str]:
        return list(json.loads(run.file.read_text())["stages"][stage]["inputs"])

    encode(run)
    denoise(run)
    encode(run)  # again, after the latents were seen
    run.record_output("decode", [run.file.with_name("latents.safetensors")], {})
    assert inputs("encode") == []
    assert inputs("denoise") == ["embeddings.safetensors"]
    assert inputs("decode") == ["embeddings.safetensors", "latents.safetensors"]


def test_a_video_of_replaced_embeddings_is_not_finished(run: RunDirectory) -> None:
    encode(run)
    denoise(run)
    other = RunDirectory.open(run.path)  # reads the latents only
    other.read_stage("denoise", LATENTS)
    video = run.path / "video.mp4"
    video.write_bytes(b"video")
    other.record_output("decode", [video], {})
    assert other.finished("decode")
    encode(run, 2.0)
    assert not other.finished("decode")


def test_invalidating_forgets_the_later_stages(run: RunDirectory) -> None:
    encode(run)
    denoise(run)
    assert run.invalidate_after("denoise") == ()
    assert run.invalidate_after("encode") == ("denoise",)
    assert run.finished("encode")
    assert "latents.safetensors: the stage denoise is not finished" in refusal(
        run.read_stage, "denoise", LATENTS
    )


def test_a_file_that_the_run_did_not_make_is_never_replaced(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(run)
    file = run.path / STAGE_FILES["denoise"]
    file.write_bytes(b"mine")
    message = refusal(denoise, run)
    assert message.startswith(f"{file}: is there and was not made by this run; move ")
    assert file.read_bytes() == b"mine"
    file.unlink()
    # Its own file that is left behind by a rerun, or by a kill before it is recorded.
    denoise(run)
    encode(run, 2.0)
    run.invalidate_after("encode")
    run.write_stage("denoise", {"latents": torch.zeros(2, 2, 3)}, LATENTS, {})
    run.invalidate_after("encode")
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            denoise(run)
    assert not run.finished("denoise")
    denoise(RunDirectory.open(run.path))
    assert run.finished("denoise")


def test_of_a_finished_stage_damage_is_replaced_and_tensors_of_the_user_are_not(
    run: RunDirectory,
) -> None:
    encode(run)
    denoise(run)
    denoise(run)
    file = run.path / STAGE_FILES["denoise"]
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b"", b"\xff" * 40):
        file.write_bytes(damaged)
        denoise(run)
        assert file.read_bytes() == whole
    mine = save({"latents": torch.ones(2, 2, 3)})
    assert len(mine) == len(whole)
    file.write_bytes(mine)
    message = refusal(denoise, run)
    assert message.startswith(f"{file}: is there and was not made by this run; move ")
    assert file.read_bytes() == mine
    assert "move it away and run" in refusal(run.read_stage, "denoise", LATENTS)


def test_no_file_that_stays_as_it_is_is_hashed_twice(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(run)
    denoise(run)
    monkeypatch.setattr(fingerprint, "_SETTLES_NS", -1)
    looked: list[str] = []

    def counted(look: Any) -> Any:
        return lambda path: looked.append(path.name) or look(path)

    monkeypatch.setattr(run_directory, "hash_output", counted(hash_output))
    monkeypatch.setattr(run_directory, "read_run", counted(run_directory.read_run))
    for _ in range(2):
        assert run.finished("encode")
        assert run.finished("denoise")
        run.settings["steps"] = 0  # of a copy
        assert run.settings == SETTINGS
    file = run.path / STAGE_FILES["denoise"]
    assert looked == ["run.json", "embeddings.safetensors", file.name]
    read = RunDirectory.open(run.path)
    read.read_stage("denoise", LATENTS)
    looked.clear()
    assert read.finished("denoise")
    assert looked == []
    # What changes is seen, whoever looked before, and however alike the file is.
    about = file.stat()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    for one in (run, read):
        assert not one.finished("denoise")
        assert "its sha256 differs" in refusal(one.read_stage, "denoise", LATENTS)


def test_a_file_that_was_changed_just_now_is_not_taken_for_known(
    run: RunDirectory,
) -> None:
    assert fingerprint.settled(run.file.stat()) is None


def test_reports_are_json(run: RunDirectory) -> None:
    encode(run)
    with pytest.raises(UsageError, match="the report of denoise must be JSON"):
        run.write_stage("denoise", latents(), LATENTS, {"s": float("inf")})
    assert sorted(os.listdir(run.path)) == ["embeddings.safetensors", "run.json"]


def test_an_output_is_a_file_or_frames_or_several(
    run: RunDirectory, tmp_path: Path
) -> None:
    video, frames = run.path / "a.mp4", run.path / "frames"
    video.write_bytes(b"video")
    frames.mkdir()
    (frames / "frame-00000.png").write_bytes(b"png")
    run.record_output("decode", [video, frames], {"seconds": 1})
    assert run.finished("decode")
    (frames / "frame-00000.png").write_bytes(b"pnh")
    assert not run.finished("decode")

    outside = tmp_path / "b.mp4"
    outside.write_bytes(b"video")
    run.record_output("decode", [outside], {})
    assert str(tmp_path) not in run.file.read_text()
    assert run.finished("decode")
    missing = run.path / "c.mp4"
    assert f"{missing}: cannot be read" in refusal(
        run.record_output, "decode", [missing], {}
    )
