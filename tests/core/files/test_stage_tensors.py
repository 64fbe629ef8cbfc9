"""A stage's tensors: bits and dtypes kept, nothing off the specs goes in or out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.files.runs import (
    EMBEDDINGS,
    embeddings,
    encode,
    failing,
    refusal,
    rewrite,
)
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.errors import UsageError


def test_a_tensor_writer_that_dies_half_way_leaves_what_was_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(run)
    before = {path: path.read_bytes() for path in run.path.iterdir()}

    def half(path: Path, data: bytes) -> None:
        path.open("wb").write(data[: len(data) // 2])
        failing()

    monkeypatch.setattr(Path, "write_bytes", half)
    assert "embeddings.safetensors: cannot be written" in refusal(encode, run, 2.0)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    assert run.finished("encode")


def test_tensors_come_back_with_their_bits_and_dtypes(run: RunDirectory) -> None:
    odd = torch.randn(2, 4, 8).to(torch.bfloat16)
    odd[0, 0, 0] = 1.0 + 2**-7  # the last bit of a bfloat16
    # A view and a shared storage, which safetensors alone would refuse.
    shared = torch.randn(4, 2, 8)
    tensors = {"prompt": odd, "negative": shared.transpose(0, 1)}
    run.write_stage("encode", tensors, EMBEDDINGS, {})
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
    message = refusal(run.write_stage, "encode", tensors, EMBEDDINGS, {})
    assert message.startswith(f"{path}: ")
    assert message.endswith(expected)
    assert not path.exists()

    as_written = [
        TensorSpec(name=n, shape=tuple(t.shape), dtypes=(str(t.dtype)[6:],))
        for n, t in tensors.items()
    ]
    run.write_stage("encode", tensors, as_written, {})
    assert refusal(run.read_stage, "encode", EMBEDDINGS) == message


def test_a_spec_without_dtypes_or_with_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="'x': dtypes must be a tuple"):
        TensorSpec(name="x", shape=(1,), dtypes="float32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'x': size -1 is negative"):
        TensorSpec(name="x", shape=(-1,), dtypes=("float32",))


def test_a_file_with_other_tensors_than_recorded_is_refused(run: RunDirectory) -> None:
    """Such as fewer tokens, with every checksum made anew."""
    encode(run)

    def fewer(document: dict[str, Any]) -> None:
        listing = document["stages"]["encode"]["tensors"]["prompt"]
        listing["shape"][1] += 1

    rewrite(run, fewer)
    message = refusal(RunDirectory.open(run.path).read_stage, "encode", EMBEDDINGS)
    assert "embeddings.safetensors: prompt is {'shape': [" in message
