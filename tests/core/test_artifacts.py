"""The run directory: whole files or none, and no file used that is not the right one.

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

from tpuport.core import artifacts
from tpuport.core.artifacts import (
    RunDirectory,
    TensorSpec,
    atomic_write_bytes,
    atomic_write_json,
    fingerprint_files,
    read_sidecar,
    save_tensors,
    sidecar_path,
    write_sidecar,
)
from tpuport.errors import ArtifactError, UsageError, WeightsError

FLOATS = ("float32", "bfloat16")
EMBEDDINGS = (
    TensorSpec(name="prompt", shape=("N", 4, 8), dtypes=FLOATS),
    TensorSpec(name="negative", shape=("N", 4, 8), dtypes=FLOATS),
    TensorSpec(name="mask", shape=("N", 4), dtypes=("int32",), optional=True),
)
LATENTS = (TensorSpec(name="latents", shape=("N", 2, 3), dtypes=("float32",)),)
SETTINGS = {"prompt": "a cat", "steps": 50, "size": [480, 720], "cache": {"every": 2}}


def embeddings(value: float = 1.0) -> dict[str, torch.Tensor]:
    prompt = torch.full((2, 4, 8), value, dtype=torch.bfloat16)
    return {"prompt": prompt, "negative": torch.zeros(2, 4, 8)}


def latents() -> dict[str, torch.Tensor]:
    return {"latents": torch.arange(12.0).reshape(2, 2, 3)}


def encode(run: RunDirectory, value: float = 1.0) -> None:
    run.write_stage(
        "encode", "embeddings.safetensors", embeddings(value), EMBEDDINGS, {"s": 1.5}
    )


def denoise(run: RunDirectory) -> None:
    run.write_stage("denoise", "latents.safetensors", latents(), LATENTS, {"steps": 50})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(
        tmp_path / "run",
        model="toy",
        variant="small",
        settings=SETTINGS,
        weights={"encoder": "aa" * 32, "vae": None},
    )


def refusal(action: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ArtifactError that ``action`` raises, which is one line."""
    with pytest.raises(ArtifactError) as caught:
        action(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(run: RunDirectory, change: Any, *, sign: bool = True) -> None:
    """Alter run.json by hand; with ``sign``, as someone who redoes the checksum."""
    document = json.loads(run.file.read_text())
    change(document)
    if sign:
        document["checksum"] = artifacts._checksum(document)
    run.file.write_text(json.dumps(document))


# --- whole or not at all


def failing(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.json"
    atomic_write_json(path, {"a": 1})
    monkeypatch.setattr(os, step, failing)
    message = refusal(atomic_write_json, path, {"a": 2})
    assert message == f"{path}: cannot be written: No space left on device"
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_tensor_writer_that_dies_half_way_leaves_what_was_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(run)
    before = {path: path.read_bytes() for path in run.path.iterdir()}

    def half(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        failing()

    monkeypatch.setattr("safetensors.torch.save_file", half)
    assert "embeddings.safetensors: cannot be written" in refusal(encode, run, 2.0)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    assert run.finished("encode")


def test_an_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with artifacts.replacing(tmp_path / "a") as file:
            file.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_file_and_folder_are_flushed_and_the_rename_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("folder" if target.is_dir() else "file")
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    atomic_write_bytes(tmp_path / "a", b"content")
    assert steps == ["file", "rename", "folder"]


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    spec = TensorSpec(name="x", shape=(1,), dtypes=("float32",))
    save_tensors(tmp_path / "tensors", {"x": torch.zeros(1)}, [spec])
    atomic_write_bytes(tmp_path / "bytes", b"")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_what_is_not_json_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.json: cannot be written as JSON"):
        atomic_write_json(tmp_path / "a.json", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


# --- tensors


def test_tensors_come_back_with_their_bits_and_dtypes(run: RunDirectory) -> None:
    odd = torch.randn(2, 4, 8).to(torch.bfloat16)
    odd[0, 0, 0] = 1.0 + 2**-7  # the last bit of a bfloat16
    # A view and a shared storage, which safetensors alone would refuse.
    shared = torch.randn(4, 2, 8)
    tensors = {"prompt": odd, "negative": shared.transpose(0, 1)}
    run.write_stage("encode", "embeddings.safetensors", tensors, EMBEDDINGS, {})
    back = RunDirectory.open(run.path).read_stage("encode", EMBEDDINGS)
    assert list(back) == ["prompt", "negative"]  # the optional mask is left out
    assert back["prompt"].dtype == torch.bfloat16
    assert torch.equal(back["prompt"].view(torch.int16), odd.view(torch.int16))
    assert torch.equal(back["negative"], tensors["negative"])


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["negative"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["stray"] = torch.zeros(1)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["prompt"] = tensors["prompt"][:, :3]


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    tensors["prompt"] = tensors["prompt"].flatten(1)


def disagree(tensors: dict[str, torch.Tensor]) -> None:
    tensors["negative"] = tensors["negative"][:1]


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["prompt"] = tensors["prompt"].double()


BAD_TENSORS = [
    (drop, "tensor negative is missing (found: prompt)"),
    (add, "tensor stray is not expected (expected: mask, negative, prompt)"),
    (reshape, "tensor prompt has shape [2, 3, 8], not [N, 4, 8]"),
    (flatten, "tensor prompt has shape [2, 32], not [N, 4, 8]"),
    (disagree, "N is 1 here and 2 in tensor prompt"),
    (widen, "tensor prompt is float64, not float32 or bfloat16"),
]


@pytest.mark.parametrize(("change", "expected"), BAD_TENSORS)
def test_tensors_off_the_specs_are_refused_on_writing_and_on_reading(
    run: RunDirectory, change: Any, expected: str
) -> None:
    tensors = embeddings()
    change(tensors)
    name = "embeddings.safetensors"
    path = run.path / name
    message = refusal(run.write_stage, "encode", name, tensors, EMBEDDINGS, {})
    assert message.startswith(f"{path}: ")
    assert message.endswith(expected)
    assert not path.exists()

    as_written = [
        TensorSpec(name=n, shape=tuple(t.shape), dtypes=(str(t.dtype)[6:],))
        for n, t in tensors.items()
    ]
    run.write_stage("encode", name, tensors, as_written, {})
    assert refusal(run.read_stage, "encode", EMBEDDINGS) == message


def test_a_spec_without_dtypes_or_with_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="'x': dtypes must be a tuple"):
        TensorSpec(name="x", shape=(1,), dtypes="float32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'x': size -1 is negative"):
        TensorSpec(name="x", shape=(-1,), dtypes=("float32",))


# --- creating and opening


def test_run_json_says_what_was_asked_for_and_what_is_finished(
    run: RunDirectory,
) -> None:
    encode(run)
    document = json.loads(run.file.read_text())
    assert document["schema"] == "tpuport.run"
    assert document["schema_version"] == 1
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
        (2, "; update tpuport, or start over"),
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
    expected = f"run.json: has schema_version {found}, and this tpuport reads 1{advice}"
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
        (lambda d: d["stages"].update(encode=1), "has no usable entry for the stage"),
        (lambda d: d["stages"]["encode"].pop("sha256"), "has no usable sha256 for"),
        (
            lambda d: d["stages"]["encode"].update(file="../../x"),
            "names a file outside the run directory",
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


def test_a_run_of_another_model_is_refused(run: RunDirectory) -> None:
    message = refusal(RunDirectory.open, run.path, model="other")
    assert (
        f'{run.file}: is of another request: model is "toy", asked "other"' in message
    )


def request(**changes: Any) -> dict[str, Any]:
    asked = {"model": "toy", "variant": "small", "settings": SETTINGS, "weights": {}}
    return {**asked, **changes}


def test_creating_over_a_run_or_over_stray_tensors_is_refused(
    run: RunDirectory, tmp_path: Path
) -> None:
    assert f"{run.file}: already describes a run" in refusal(
        RunDirectory.create, run.path, **request()
    )
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
        RunDirectory.create, file, **request()
    )


def test_settings_that_are_not_json_are_refused_before_the_folder_is_made(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="settings must be JSON"):
        RunDirectory.create(tmp_path / "run", **request(settings={"prompt": object()}))
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


# --- the same request, the same weights


def test_every_differing_setting_is_named_with_both_values(run: RunDirectory) -> None:
    asked = {"prompt": "a dog", "size": [480, 720], "cache": {"every": 3}, "seed": 7}
    message = refusal(run.check_request, model="toy", variant="large", settings=asked)
    assert message.startswith(f"{run.file}: is of another request: ")
    for difference in (
        'variant is "small", asked "large"',
        "settings.cache.every is 2, asked 3",
        'settings.prompt is "a cat", asked "a dog"',
        "settings.seed is not set, asked 7",
        "settings.steps is 50, asked not set",
    ):
        assert difference in message
    assert "size" not in message


def test_the_same_request_passes_whatever_the_spelling(run: RunDirectory) -> None:
    same = {"steps": 50.0, "size": (480, 720), "cache": {"every": 2}, "prompt": "a cat"}
    run.check_request(model="toy", variant="small", settings=same)
    run.check_request(model="toy", settings={"steps": 50}, subset=True)
    assert "steps" in refusal(
        run.check_request, model="toy", settings={"steps": 51}, subset=True
    )
    # True == 1 in Python, and is not the same setting.
    assert "every" in refusal(
        run.check_request,
        model="toy",
        settings={"cache": {"every": True}},
        subset=True,
    )


def test_long_values_are_shown_where_they_start_to_differ(tmp_path: Path) -> None:
    prompt = "word " * 100
    settings = {"prompt": prompt + "north\n"}
    run = RunDirectory.create(tmp_path / "run", **request(settings=settings))
    message = refusal(
        run.check_request, model="toy", settings={"prompt": prompt + "south\n"}
    )
    assert "north" in message
    assert "south" in message
    assert len(message) < 400 + len(str(run.file))


def test_the_settings_digest_is_of_the_request_alone(
    run: RunDirectory, tmp_path: Path
) -> None:
    digest = run.settings_digest()
    encode(run)
    assert run.settings_digest() == digest
    spelling = dict(reversed(SETTINGS.items())) | {"steps": 50.0}
    same = RunDirectory.create(tmp_path / "same", **request(settings=spelling))
    other = RunDirectory.create(
        tmp_path / "other", **request(settings=SETTINGS | {"steps": 51})
    )
    assert same.settings_digest() == digest
    assert other.settings_digest() != digest


def test_other_weights_are_refused_and_unknown_ones_recorded(
    run: RunDirectory,
) -> None:
    run.check_weights("encoder", "aa" * 32)
    run.check_weights("encoder", None)
    run.check_weights("vae", "bb" * 32)
    assert run.weights == {"encoder": "aa" * 32, "vae": "bb" * 32}
    message = refusal(run.check_weights, "vae", "cc" * 32)
    assert f"{run.file}: was made with other weights for vae" in message
    assert "recorded bbbbbbbbbbbbbbbb, given cccccccccccccccc" in message


# --- stages


@pytest.mark.parametrize("stage", ["encode", "denoise"])
def test_a_stage_that_is_not_finished_names_its_file_and_command(
    run: RunDirectory, stage: str
) -> None:
    message = refusal(run.read_stage, stage, LATENTS)
    assert str(run.path / artifacts.STAGE_FILES[stage]) in message
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
    sha256, size = artifacts._hash_output(path)
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
    run.record_output("preview", run.file.with_name("latents.safetensors"), {})
    assert inputs("encode") == []
    assert inputs("denoise") == ["embeddings.safetensors"]
    # A stage outside the known order may have used anything.
    assert inputs("preview") == ["embeddings.safetensors", "latents.safetensors"]


def test_a_video_of_replaced_embeddings_is_not_finished(run: RunDirectory) -> None:
    encode(run)
    denoise(run)
    other = RunDirectory.open(run.path)  # reads the latents only
    other.read_stage("denoise", LATENTS)
    video = run.path / "video.mp4"
    video.write_bytes(b"video")
    other.record_output("decode", video, {})
    assert other.finished("decode")
    encode(run, 2.0)
    assert not other.finished("decode")


def test_invalidating_forgets_the_later_stages(run: RunDirectory) -> None:
    encode(run)
    denoise(run)
    assert run.invalidate_after("denoise") == ()
    assert run.invalidate_after("encode", ("encode", "denoise")) == ("denoise",)
    assert run.finished("encode")
    assert "latents.safetensors: the stage denoise is not finished" in refusal(
        run.read_stage, "denoise", LATENTS
    )
    with pytest.raises(UsageError, match="no stage 'train' among encode, denoise"):
        run.invalidate_after("train")


@pytest.mark.parametrize("name", ["run.json", "../x", "/x", "sub/x", "", ".", ".."])
def test_a_stage_file_is_a_plain_name(run: RunDirectory, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the file of a stage"):
        run.write_stage("encode", name, embeddings(), EMBEDDINGS, {})


def test_two_stages_cannot_share_a_file_and_reports_are_json(
    run: RunDirectory,
) -> None:
    encode(run)
    with pytest.raises(UsageError, match="is the file of the stage encode"):
        run.write_stage("denoise", "embeddings.safetensors", latents(), LATENTS, {})
    with pytest.raises(UsageError, match="the report of denoise must be JSON"):
        run.write_stage("denoise", "x", latents(), LATENTS, {"s": float("inf")})
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
    run.record_output("decode", outside, {})
    assert str(tmp_path) not in run.file.read_text()
    assert run.finished("decode")
    missing = run.path / "c.mp4"
    assert f"{missing}: cannot be read" in refusal(
        run.record_output, "decode", missing, {}
    )


# --- fingerprints


def test_a_fingerprint_is_of_names_and_contents_wherever_they_lie(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "sub").mkdir(parents=True)
    (one / "a").write_bytes(b"a")
    (one / "sub" / "b").write_bytes(b"b")
    shutil.copytree(one, two)
    expected = fingerprint_files(one, [one / "a", one / "sub" / "b"])
    assert re.fullmatch("[0-9a-f]{64}", expected)
    assert fingerprint_files(two, [two / "sub" / "b", two / "a"]) == expected
    (two / "link").symlink_to(two / "a")
    (two / "a").rename(two / "blob")
    (two / "a").symlink_to(two / "blob")
    assert fingerprint_files(two, [two / "a", two / "sub" / "b"]) == expected

    (two / "sub" / "b").write_bytes(b"c")
    assert fingerprint_files(two, [two / "a", two / "sub" / "b"]) != expected
    (one / "a").rename(one / "c")
    assert fingerprint_files(one, [one / "c", one / "sub" / "b"]) != expected


def test_a_large_file_is_sampled_to_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "FINGERPRINT_WHOLE_BYTES", 8 << 20)
    path, size = tmp_path / "big", (12 << 20) + 5
    with path.open("wb") as file:
        file.truncate(size)
    seen = {fingerprint_files(tmp_path, [path])}
    for offset in (0, (1 << 20) - 1, size - (1 << 20), size - 1, 1 << 20):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        seen.add(fingerprint_files(tmp_path, [path]))
    with path.open("r+b") as file:
        file.truncate(size + 1)
    seen.add(fingerprint_files(tmp_path, [path]))
    assert len(seen) == 7


def test_a_fingerprint_of_nothing_or_of_a_missing_file_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="no files to fingerprint"):
        fingerprint_files(tmp_path, [])
    with pytest.raises(WeightsError, match=r"gone\.bin: cannot be read: No such file"):
        fingerprint_files(tmp_path, [tmp_path / "gone.bin"])
    with pytest.raises(UsageError, match="/elsewhere: is not in "):
        fingerprint_files(tmp_path, [Path("/elsewhere")])


# --- the sidecar


def test_a_sidecar_comes_back_as_written_and_never_is_run_json(tmp_path: Path) -> None:
    path = sidecar_path(tmp_path / "run.mp4")
    assert path == tmp_path / "run.mp4.json"
    assert sidecar_path(tmp_path / "run") == tmp_path / "run.png.json"
    write_sidecar(path, {"seed": 7, "size": (480, 720)})
    assert read_sidecar(path) == {"seed": 7, "size": [480, 720]}
    document = json.loads(path.read_text())
    assert (document["schema"], document["schema_version"]) == ("tpuport.sidecar", 1)
    with pytest.raises(UsageError, match="the key schema is tpuport's own"):
        write_sidecar(path, {"schema": "mine"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text[:-9], "is not JSON, or is cut short"),
        (lambda text: text.replace("sidecar", "run"), 'not "tpuport.sidecar"'),
        (lambda text: text.replace('on": 1', 'on": 9'), "has schema_version 9"),
        (lambda text: text.replace("7", "8", 1), "was altered"),
        (None, "is missing"),
    ],
)
def test_a_sidecar_is_refused_like_a_run_json(
    tmp_path: Path, change: Any, expected: str
) -> None:
    path = tmp_path / "video.mp4.json"
    write_sidecar(path, {"seed": 7})
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    message = refusal(read_sidecar, path)
    assert message.startswith(f"{path}: ")
    assert expected in message
