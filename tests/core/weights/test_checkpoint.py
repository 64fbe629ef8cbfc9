"""Checkpoints: every way in which one can be wrong is one line that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.stored_tensors import read_whole
from tpuport.errors import HubError, WeightsError

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
INDEX = f"{TRANSFORMER}.index.json"
TWO = "transformer/two.safetensors"
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


def find(weights: Path | str) -> PipelineFolder:
    return PipelineFolder.find(weights, Reporter())


def load(folder: Path) -> torch.nn.Module:
    """The transformer, with its weights read."""
    found = find(str(folder)).load_component("transformer", torch.float32)
    read_whole(found)
    return found


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
        save_file(
            {n: tensors[n] for n in part}, whole.with_name(file), {"format": "pt"}
        )
    whole.unlink()
    mapping = {n: file for file, part in halves.items() for n in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return mapping


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- whole


def test_a_sharded_checkpoint_loads_like_a_whole_one(
    folder: Path, demo_folder: Path
) -> None:
    mapping = shard(folder)
    files = Checkpoint(folder, "x").weight_files("transformer")
    assert {n: p.name for n, p in files.items()} == mapping
    find(str(folder)).check_components()
    expected = load_file(demo_folder / TRANSFORMER)
    found = load(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_fingerprint_is_of_the_content(folder: Path, demo_folder: Path) -> None:
    one, two = Checkpoint(demo_folder, "a"), Checkpoint(folder, "b")
    assert one.fingerprint("vae") == two.fingerprint("vae")
    rewrite(folder / TRANSFORMER, lambda t: t[SMALL].add_(1))
    assert one.fingerprint("transformer") != two.fingerprint("transformer")


def test_whatever_is_read_is_in_the_fingerprint(folder: Path) -> None:
    """Shards by the index's names, configs, and the class that the index names."""
    shard(folder)
    before = Checkpoint(folder, "x").fingerprint("transformer")
    rewrite(folder / TWO, lambda t: next(iter(t.values())).add_(1))
    changed = Checkpoint(folder, "x").fingerprint("transformer")
    assert changed != before
    edit_json(folder / "transformer/config.json", dropout=0.1)
    assert Checkpoint(folder, "x").fingerprint("transformer") != changed
    before = Checkpoint(folder, "x").fingerprint("scheduler")
    edit_json(folder / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    assert Checkpoint(folder, "x").fingerprint("scheduler") != before


# --- the folder


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    message = refusal(find, str(tmp_path / "none"), code=2)
    assert f"weights folder '{tmp_path / 'none'}' does not exist" in message
    (tmp_path / "file").touch()
    message = refusal(find, str(tmp_path / "file"), code=2)
    assert "is a file; a folder in the diffusers layout is needed" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "is missing"),
        ('{"_class', "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "names no pipeline"),
    ],
)
def test_an_index_that_is_not_one(
    folder: Path, text: str | None, expected: str
) -> None:
    index = folder / "model_index.json"
    index.unlink() if text is None else index.write_text(text)
    message = refusal(lambda: find(str(folder)).pipeline_class)
    assert "model_index.json" in message
    assert expected in message


def test_a_hub_id_that_cannot_be_reached() -> None:
    """The tests forbid the hub; the message is one line all the same."""
    message = refusal(find, "nobody/no-such-model")
    assert message == (
        "hub id 'nobody/no-such-model' is not in the cache and the hub cannot be "
        "reached; HF_HUB_OFFLINE is set: unset it, or download it elsewhere and pass "
        "the folder to --weights"
    )
    with pytest.raises(HubError):
        find("nobody/no-such-model")


# --- a component's files


def in_shards(change: Callable[[Path, dict[str, str]], object]) -> Any:
    """A change to a checkpoint in two files, whose map it is given."""
    return lambda folder: change(folder, shard(folder))


def only_pickle(folder: Path) -> None:
    (folder / TRANSFORMER).unlink()
    torch.save({}, folder / "transformer/diffusion_pytorch_model.bin")


def overwrite(cut: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / TRANSFORMER).read_bytes()
        (folder / TRANSFORMER).unlink()
        (folder / TRANSFORMER).write_bytes(cut(data))

    return change


def index_elsewhere(name: Any) -> Any:
    return in_shards(
        lambda folder, mapping: (folder / INDEX).write_text(
            json.dumps({"weight_map": {**mapping, SMALL: name}})
        )
    )


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"index of {name}": (
            index_elsewhere(name),
            f"weight_map.{SMALL} is {name!r}, which is no file of",
        )
        for name in ("../two.safetensors", "/etc/passwd", "..", "a/b", 3, None, [])
    },
    "no weights": (
        lambda folder: (folder / TRANSFORMER).unlink(),
        "transformer/ has no safetensors weights",
    ),
    "no folder": (
        lambda folder: shutil.rmtree(folder / "transformer"),
        "folder transformer/ is missing",
    ),
    "only pickle": (
        only_pickle,
        "transformer/ has only pickle weights (diffusion_pytorch_model.bin)",
    ),
    "truncated": (
        overwrite(lambda data: data[: len(data) // 2]),
        f"{TRANSFORMER} is truncated or not a safetensors file",
    ),
    "not safetensors": (
        overwrite(lambda data: b"\xff" * 100),
        f"{TRANSFORMER} is truncated or not a safetensors file",
    ),
    "no shard": (
        in_shards(lambda folder, _: (folder / TWO).unlink()),
        f"{TWO} is missing, though diffusion_pytorch_model.safetensors.index.json "
        "names it",
    ),
    "no map": (
        in_shards(lambda folder, _: (folder / INDEX).write_text("{}")),
        f"{INDEX} has no map",
    ),
    "shard without a tensor": (
        in_shards(
            lambda folder, mapping: rewrite(
                folder / "transformer" / mapping[SMALL], lambda t: t.pop(SMALL)
            )
        ),
        f"lacks {SMALL}, which",
    ),
    "shard with another tensor": (
        in_shards(
            lambda folder, _: rewrite(
                folder / TWO, lambda t: t.update(stray=torch.zeros(1))
            )
        ),
        f"{TWO} holds stray, which",
    ),
}


@pytest.mark.parametrize(("change", "expected"), BROKEN.values(), ids=BROKEN)
def test_files_that_are_wrong_are_refused_before_a_tensor_is_read(
    folder: Path, change: Callable[[Path], None], expected: str
) -> None:
    """By the check of all components, and by the load of one."""
    change(folder)
    for action in (lambda: find(str(folder)).check_components(), lambda: load(folder)):
        message = refusal(action)
        assert message.startswith(str(folder))
        assert expected in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(SMALL), f"transformer/ has no weight {SMALL}"),
        (lambda t: t.update({SMALL: torch.zeros(3)}), "transformer does not load"),
        *(
            (
                lambda t, value=value: t[SMALL].__setitem__(1, value),
                f"transformer: {SMALL} holds NaN or infinite values",
            )
            for value in (float("nan"), float("-inf"))
        ),
    ],
    ids=["absent", "shape", "nan", "infinite"],
)
def test_tensors_that_cannot_be_are_named(
    folder: Path, change: Callable[[Any], None], expected: str
) -> None:
    rewrite(folder / TRANSFORMER, change)
    message = refusal(load, folder)
    assert message.startswith(f"{folder}: ")
    assert expected in message
