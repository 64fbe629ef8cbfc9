"""Checkpoints: every way in which one can be wrong is one line that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tpuport
from tpuport.core.run.session import Session
from tpuport.core.spec.component import Component
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.skeleton import build_skeleton
from tpuport.errors import HubError, ShardingError, TpuportError, WeightsError
from tpuport.plugins import get_port

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
INDEX = f"{TRANSFORMER}.index.json"
TEXT = "text_encoder/model.safetensors"
#: A small weight whose shape no other weight needs to agree with.
SMALL = "proj_out.bias"


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    """A demo checkpoint to break. Its weights are links until they are rewritten."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(demo_folder, copy, copy_function=_link)
    return copy


def _link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        Path(target).symlink_to(source)
    else:
        shutil.copy(source, target)


def open_session(weights: Path | str, **options: Any) -> Session:
    return tpuport.load("cogvideox", weights=weights, compile_cache=False, **options)


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Loads a component of the folder through a session, as a stage would.

    With upstream's blocks, whose weights are those of the files as they are.
    """
    sessions: list[Session] = []

    def load(name: str, *used: tuple[str, ...]) -> Any:
        sessions.append(open_session(folder, blocks="upstream"))
        return sessions[-1].components.load(name, *used)

    yield load
    for session in sessions:
        session.close()


def refusal(action: Callable[..., Any], *args: Any, code: int = 1) -> str:
    """The message of the WeightsError that ``action`` raises: one line, with a path."""
    with pytest.raises(WeightsError) as caught:
        action(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == code
    return message


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite a safetensors file with other tensors."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def shard(folder: Path) -> dict[str, str]:
    """Split the transformer into two files with an index; returns the weight map."""
    whole = folder / TRANSFORMER
    tensors = load_file(whole)
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, whole.with_name(file))
    whole.unlink()
    mapping = {n: file for file, part in halves.items() for n in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))
    return mapping


def assert_same(loaded: Any, stored: dict[str, torch.Tensor]) -> None:
    """The arrays are the stored tensors, of each block in its stack's place."""
    members = [(a, m) for a, m in loaded.ported.arrays.items() if m[0] in stored]
    assert {name for _, names in members for name in names} == set(stored)
    for array, names in members:
        tensors = [stored[name].numpy() for name in names]
        expected = np.stack(tensors) if len(names) > 1 else tensors[0]
        np.testing.assert_array_equal(np.asarray(loaded.weights[array]), expected)


# --- whole


def test_weights_are_those_of_the_file(
    folder: Path, load: Callable[[str], Any]
) -> None:
    loaded = load("transformer")
    stored = load_file(folder / TRANSFORMER)
    assert set(loaded.ported.names.stored) == set(stored)
    assert_same(loaded, stored)
    assert {w.dtype for w in loaded.weights.values()} == {jnp.dtype("float32")}


def test_only_what_a_stage_needs_is_loaded(load: Callable[[str], Any]) -> None:
    decode = get_port("cogvideox").stage("decode")
    names = set(load("vae", decode.loads["vae"]).weights)
    assert any(name.startswith("decoder.") for name in names)
    assert not any(name.startswith("encoder.") for name in names)


def test_a_sharded_checkpoint_loads_like_a_whole_one(
    folder: Path, demo_folder: Path, load: Callable[[str], Any]
) -> None:
    mapping = shard(folder)
    files = Checkpoint(folder, "x").weight_files("transformer")
    assert {n: p.name for n, p in files.items()} == mapping
    assert_same(load("transformer"), load_file(demo_folder / TRANSFORMER))


def test_weights_come_in_the_dtype_asked_for(folder: Path) -> None:
    with open_session(folder, dtype="bfloat16") as session:
        weights = session.components.load("text_encoder").weights
        assert {w.dtype for w in weights.values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", ["shared.weight", "encoder.embed_tokens.weight"])
def test_a_tied_weight_may_be_stored_under_either_name(
    folder: Path, load: Callable[[str], Any], name: str
) -> None:
    expected = load_file(folder / TEXT)["shared.weight"]

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors.pop("shared.weight")

    rewrite(folder / TEXT, rename)
    loaded = load("text_encoder")
    found = loaded.weights[loaded.ported.names.stored[0]]
    np.testing.assert_array_equal(np.asarray(found), expected.numpy())


def test_a_component_is_read_once_until_it_is_released(folder: Path) -> None:
    with open_session(folder) as session:
        first = session.components.load("transformer")
        assert session.components.load("transformer") is first
        session.components.release("transformer")
        assert first.weights[SMALL].is_deleted()
        assert session.components.load("transformer") is not first


def test_a_fingerprint_is_of_the_content(folder: Path, demo_folder: Path) -> None:
    one, two = Checkpoint(demo_folder, "a"), Checkpoint(folder, "b")
    assert one.fingerprint("vae") == two.fingerprint("vae")
    rewrite(folder / TRANSFORMER, lambda t: t[SMALL].add_(1))
    assert one.fingerprint("transformer") != two.fingerprint("transformer")


def test_whatever_is_read_is_in_the_fingerprint(folder: Path) -> None:
    """Shards by the index's names, configs, and the class that the index names."""
    shard(folder)
    before = Checkpoint(folder, "x").fingerprint("transformer")
    rewrite(
        folder / "transformer/two.safetensors", lambda t: next(iter(t.values())).add_(1)
    )
    changed = Checkpoint(folder, "x").fingerprint("transformer")
    assert changed != before
    edit_json(folder / "transformer/config.json", dropout=0.1)
    assert Checkpoint(folder, "x").fingerprint("transformer") != changed
    before = Checkpoint(folder, "x").fingerprint("scheduler")
    edit_json(folder / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    assert Checkpoint(folder, "x").fingerprint("scheduler") != before


# --- the folder


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    message = refusal(open_session, tmp_path / "none", code=2)
    assert f"weights folder '{tmp_path / 'none'}' does not exist" in message
    (tmp_path / "file").touch()
    message = refusal(open_session, tmp_path / "file", code=2)
    assert "is a file; a folder in the diffusers layout is needed" in message


def test_a_folder_without_an_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    message = refusal(open_session, folder)
    assert message.startswith(f"{folder / 'model_index.json'} is missing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"_class', "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "a None;"),
    ],
)
def test_an_index_that_is_not_one(folder: Path, text: str, expected: str) -> None:
    (folder / "model_index.json").write_text(text)
    message = refusal(open_session, folder)
    assert "model_index.json" in message
    assert expected in message


def test_a_checkpoint_of_another_pipeline(folder: Path) -> None:
    edit_json(folder / "model_index.json", _class_name="WanPipeline")
    message = refusal(open_session, folder)
    assert message == (
        f"{folder}: model_index.json is of a WanPipeline; model 'cogvideox' reads"
        " CogVideoXPipeline, CogVideoXImageToVideoPipeline,"
        " CogVideoXVideoToVideoPipeline"
    )


def test_the_model_that_reads_a_pipeline_is_named(folder: Path) -> None:
    edit_json(folder / "model_index.json", _class_name="HunyuanVideo15Pipeline")
    message = refusal(open_session, folder)
    assert message.endswith(". Use model hunyuanvideo")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_component_of_another_class(folder: Path, load: Callable[[str], Any]) -> None:
    edit_json(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    message = refusal(load, "vae")
    assert message == (
        f"{folder}: vae is a AutoencoderKL, expected AutoencoderKLCogVideoX; name "
        "another checkpoint with --weights"
    )
    edit_json(folder / "model_index.json", vae=[None, None])
    assert "model_index.json has no 'vae'" in refusal(load, "vae")


def test_a_hub_id_that_cannot_be_reached() -> None:
    """The tests forbid the hub; the message is one line all the same."""
    message = refusal(open_session, "nobody/no-such-model")
    assert message == (
        "hub id 'nobody/no-such-model' is not in the cache and the hub cannot be "
        "reached; HF_HUB_OFFLINE is set: unset it, or download it elsewhere and pass "
        "the folder to weights"
    )
    with pytest.raises(HubError):
        open_session("nobody/no-such-model")


# --- a component's files


def remove_weights(folder: Path) -> None:
    (folder / TRANSFORMER).unlink()


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder / "transformer")


def remove_config(folder: Path) -> None:
    (folder / "transformer/config.json").unlink()


def only_pickle(folder: Path) -> None:
    remove_weights(folder)
    torch.save({}, folder / "transformer/diffusion_pytorch_model.bin")


def truncate(folder: Path) -> None:
    data = (folder / TRANSFORMER).read_bytes()
    (folder / TRANSFORMER).unlink()
    (folder / TRANSFORMER).write_bytes(data[: len(data) // 2])


def not_safetensors(folder: Path) -> None:
    (folder / TRANSFORMER).unlink()
    (folder / TRANSFORMER).write_bytes(b"\xff" * 100)


def drop_tensor(folder: Path) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t.pop(SMALL))


def add_tensor(folder: Path) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t.update(stray=torch.zeros(1)))


def rename_tensor(folder: Path) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t.update(stray=t.pop(SMALL)))


def remove_shard(folder: Path) -> None:
    shard(folder)
    (folder / "transformer/two.safetensors").unlink()


def index_without_map(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("{}")


def shard_without_tensor(folder: Path) -> None:
    mapping = shard(folder)
    rewrite(folder / f"transformer/{mapping[SMALL]}", lambda t: t.pop(SMALL))


def shard_with_stray(folder: Path) -> None:
    shard(folder)
    stray = {"stray": torch.zeros(1)}
    rewrite(folder / "transformer/one.safetensors", lambda t: t.update(stray))


def index_elsewhere(name: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        mapping = shard(folder)
        (folder / INDEX).write_text(
            json.dumps({"weight_map": {**mapping, SMALL: name}})
        )

    change.__name__ = f"index_of_{name}"
    return change


def of_whole_numbers(folder: Path) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t.update({SMALL: t[SMALL].to(torch.int8)}))


BROKEN = [
    *(
        (index_elsewhere(name), f"weight_map.{SMALL} is {name!r}, which is no file of")
        for name in ("../two.safetensors", "/etc/passwd", "..", "a/b", 3, None, [])
    ),
    (of_whole_numbers, f"transformer/ holds {SMALL} as I8, expected one of F64, F32"),
    (remove_weights, "transformer/ has no safetensors weights"),
    (only_pickle, "transformer/ has only pickle weights (diffusion_pytorch_model.bin)"),
    (truncate, f"{TRANSFORMER} is truncated or not a safetensors file"),
    (not_safetensors, f"{TRANSFORMER} is truncated or not a safetensors file"),
    (drop_tensor, f"does not fit its config.json: missing tensor {SMALL}"),
    (add_tensor, "does not fit its config.json: extra tensor stray"),
    (rename_tensor, f"missing tensor {SMALL}; extra tensor stray"),
    (
        remove_shard,
        "transformer/two.safetensors is missing, though "
        "diffusion_pytorch_model.safetensors.index.json names it",
    ),
    (index_without_map, f"{INDEX} has no map"),
    (shard_without_tensor, f"lacks {SMALL}, which"),
    (shard_with_stray, "transformer/one.safetensors holds stray, which"),
]


@pytest.mark.parametrize(("change", "expected"), BROKEN)
def test_files_that_are_wrong_are_refused_by_both_ways_in(
    folder: Path, change: Callable[[Path], None], expected: str
) -> None:
    """By the load onto the devices, and by the check before upstream's own load."""
    change(folder)
    with open_session(folder) as session:
        message = refusal(session.components.load, "transformer")
        assert message.startswith(str(folder))
        assert expected in message
        kept = change in (only_pickle, of_whole_numbers)
        assert ("; download the " in message) != kept
        assert refusal(session.components.check_files, "transformer") == message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (remove_folder, "transformer/config.json is missing"),
        (remove_config, "transformer/config.json is missing"),
    ],
)
def test_a_checkpoint_without_a_component(
    folder: Path, change: Callable[[Path], None], expected: str
) -> None:
    change(folder)
    message = refusal(open_session, folder)
    assert expected in message
    assert message.endswith("; download the checkpoint again")


def test_a_tensor_of_another_shape(folder: Path) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t.update({SMALL: torch.zeros(3)}))
    with open_session(folder) as session:
        message = refusal(session.components.load, "transformer")
        assert message == (
            f"{folder}: transformer/ holds {SMALL} of shape (3,); its config.json asks"
            " for (128,); download the folder again"
        )
        assert refusal(session.components.check_files, "transformer") == message


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named_with_their_file(
    folder: Path, load: Callable[[str], Any], value: float
) -> None:
    rewrite(folder / TRANSFORMER, lambda t: t[SMALL].__setitem__(1, value))
    message = refusal(load, "transformer")
    assert message.startswith(
        f"{folder}: {TRANSFORMER}: {SMALL} holds NaN or infinite values"
    )


# --- skeletons


def test_a_skeleton_has_no_weights_and_its_tables(folder: Path) -> None:
    with open_session(folder) as session:
        transformer = session.components.skeleton("transformer")
        encoder = session.components.skeleton("text_encoder")
    assert {p.device.type for p in transformer.parameters()} == {"meta"}
    assert not transformer.training
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


def test_a_config_that_builds_nothing_is_refused(folder: Path) -> None:
    with open_session(folder) as session:
        component = session.port.components["transformer"]
        config = session.checkpoint.config("transformer")
    message = refusal(build_skeleton, component, {**config, "num_layers": "three"})
    assert message.startswith(
        "transformer/config.json does not build a CogVideoXTransformer3DModel"
    )


def test_rules_that_do_not_fit_are_found_before_a_tensor_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    def unread(*args: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "stream", unread)
    with open_session(folder) as session:
        components = session.components
        component: Component = session.port.components["transformer"]
        components.port = replace(
            session.port,
            components={"transformer": replace(component, sharding=())},
        )
        with pytest.raises(ShardingError, match="transformer") as caught:
            components.load("transformer")
    assert isinstance(caught.value, TpuportError)
