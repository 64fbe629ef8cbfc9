"""Upstream's values come back from JSON and tensors: equal, in the same order."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from transformers.modeling_outputs import BaseModelOutput

from tpuport.core.drive.kept_values import Kept, KeptError, kept, shape_of
from tpuport.errors import ArtifactError


def back(value: Any) -> Any:
    """The value, through a text."""
    found = kept(value)
    return Kept(json.loads(json.dumps(found.plain)), found.tensors).value()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        "text",
        0.1,
        math.inf,
        [1, [2.0, None]],
        (1, (2, [3])),
        {"a": 1, 2: (3,)},
        OrderedDict(b=1, a=2),
        torch.float32,
        torch.device("cpu"),
        torch.Size([2, 3]),
    ],
)
def test_plain_values(value: Any) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan() -> None:
    assert math.isnan(back(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_keep_their_order_in_memory(dtype: torch.dtype) -> None:
    """Upstream's operators round by that order too."""
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype).permute(2, 0, 1)
    found = back((tensor,))[0]
    assert torch.equal(found, tensor)
    assert found.dtype == dtype
    assert found.stride() == tensor.stride()
    assert found.data_ptr() != tensor.data_ptr()


def test_arrays_of_numpy() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    assert np.array_equal(back(array), array)
    number = back(np.float32(1.5))
    assert isinstance(number, np.float32)
    assert number == 1.5


def test_outputs_and_distributions_of_upstream() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(1, 2))
    assert torch.equal(back(output).last_hidden_state, torch.ones(1, 2))
    assert back(output).hidden_states is None
    parameters = torch.linspace(-1, 1, 8).reshape(1, 4, 2, 1)
    posterior = AutoencoderKLOutput(
        latent_dist=DiagonalGaussianDistribution(parameters)
    )
    found = back(posterior).latent_dist
    assert torch.equal(found.mode(), posterior.latent_dist.mode())
    assert torch.equal(found.std, posterior.latent_dist.std)


def test_what_is_kept_is_not_upstreams_own() -> None:
    tensor = torch.zeros(2)
    found = kept([tensor])
    tensor += 1
    assert torch.equal(found.value()[0], torch.zeros(2))
    found.value()[0].add_(1)
    assert torch.equal(found.value()[0], torch.zeros(2))


def test_shapes_alone_come_back_as_zeros() -> None:
    found = shape_of((torch.ones(2, 3, dtype=torch.bfloat16),))
    assert all(tensor.is_meta for tensor in found.tensors)
    (zeros,) = found.value()
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16))


class Own:
    """Of no library of upstream."""


@pytest.mark.parametrize("value", [Own(), lambda: 0, torch.nn.Linear(1, 1), print])
def test_what_no_file_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(KeptError, match="cannot be kept"):
        kept([value])


def test_a_value_within_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(KeptError, match="deep"):
        kept(value)


@pytest.mark.parametrize(
    "where", ["os:system", "subprocess:Popen", "torch:ones", "torch.no:Such"]
)
def test_a_file_names_no_code(where: str) -> None:
    with pytest.raises(ArtifactError, match=where):
        Kept({"class": where, "attributes": []}, ()).value()
