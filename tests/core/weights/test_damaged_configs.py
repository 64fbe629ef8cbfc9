"""Configs that cannot be: refused before anything runs, by file and field."""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from tests.measure.damage import MISSING, Damage, damaged, damages, sample
from tpuport.core.drive.rehearsal import without_weights
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.configs import check_config
from tpuport.errors import TpuportError, WeightsError
from tpuport.plugins import folder_of, model_plugins

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TRANSFORMER, VAE = "transformer/config.json", "vae/config.json"
TEXT = "text_encoder/config.json"
CONFIGS = (INDEX, TRANSFORMER, VAE, TEXT, SCHEDULER)


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    """A demo checkpoint whose configs are to be damaged; its weights are links."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(demo_folder, copy, symlinks=True)
    return copy


def check_all(folder: Path) -> None:
    """What is checked of a folder before weights are read, and what is built."""
    found = PipelineFolder.find(str(folder), Reporter())
    found.check_components()
    without_weights(found, torch.float32)


def outcome(folder: Path, file: str, damage: Damage) -> str:
    """The refusal of a damage, or "" where a run may begin."""
    path = folder / file
    whole = path.read_text()
    path.write_text(json.dumps(damaged(json.loads(whole), damage)))
    try:
        check_all(folder)
    except TpuportError as error:
        return str(error)
    finally:
        path.write_text(whole)
    return ""


def assert_clear(message: str, file: str, damage: Damage) -> None:
    """One line that names the component or the file."""
    assert "\n" not in message
    assert len(message) <= 400  # with the path of a test's folder
    words = (file, file.partition("/")[0], damage.where[0])
    assert any(str(word) in message for word in words), (damage, message)


def found(folder: Path, file: str) -> Iterator[Damage]:
    return damages(json.loads((folder / file).read_text()), 2)


@pytest.mark.parametrize("file", CONFIGS)
def test_a_damaged_config_never_ends_unexpectedly(folder: Path, file: str) -> None:
    tried = sample(found(folder, file), 12)
    messages = [outcome(folder, file, damage) for damage in tried]
    for damage, message in zip(tried, messages, strict=True):
        if message:
            assert_clear(message, file, damage)
    # Fields for people, and those whose absence is upstream's default, may be anything.
    assert sum(map(bool, messages)) >= len(tried) * 2 / 3


NAMED = [
    (INDEX, "vae", ["diffusers", 3], "vae is ['diffusers', 3]"),
    (TRANSFORMER, "num_layers", 10**8, "num_layers is 100000000: more than "),
    (TRANSFORMER, "num_layers", 0, "num_layers is 0: it must be above 0"),
    (TRANSFORMER, "patch_size", "two", "a whole number is needed"),
    (TRANSFORMER, "norm_eps", None, "norm_eps is None: a number is need"),
    (TRANSFORMER, "activation_fn", "x", "does not build a CogVideoXTran"),
    (VAE, "block_out_channels", [], "channels is []: it must not be emp"),
    (VAE, "block_out_channels", ["x"], "every entry must be a whole numb"),
    (VAE, "scaling_factor", "x", "scaling_factor is 'x': a number is"),
    (VAE, "scaling_factor", 0.0, "scaling_factor is 0.0: it must be ab"),
    (VAE, "temporal_compression_ratio", 10**9, "at most 4096 is possible"),
    (TEXT, "feed_forward_proj", "zz", "no such activation funct"),
    (TEXT, "num_heads", 2.5, "num_heads is 2.5: a whole number"),
    (TEXT, "model_type", "t6", "transformers has no such model"),
    (TEXT, "is_gated_act", None, "is None: true or false is ne"),
    (TEXT, "num_layers", -1, "num_layers is -1: it must be abo"),
    (SCHEDULER, "beta_schedule", "x", "one of linear, scaled_linear, squaredcos"),
    (SCHEDULER, "prediction_type", "x", "prediction_type is 'x': one of epsilon, "),
    (SCHEDULER, "trained_betas", ["x"], "every entry must be a number"),
]


@pytest.mark.parametrize(("file", "field", "value", "expected"), NAMED)
def test_a_value_that_cannot_be_is_named(
    folder: Path, file: str, field: str, value: Any, expected: str
) -> None:
    message = outcome(folder, file, Damage((field,), value))
    assert expected in message
    assert file in message
    assert message.endswith("; download the file again")
    assert "UnboundLocalError" not in message


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("transformer", "CogVideoX", "has no transformer, which CogVideoXPipeline"),
        ("scheduler", ["diffusers", "None"], "names scheduler as diffusers.None"),
        ("tokenizer", ["transformers", "T6"], "names tokenizer as transformers.T6"),
        ("tokenizer", ["os", "system"], "names tokenizer as os.system; tpuport runs"),
    ],
)
def test_a_class_that_cannot_be_is_named(
    folder: Path, field: str, value: Any, expected: str
) -> None:
    message = outcome(folder, INDEX, Damage((field,), value))
    assert f"{INDEX} {expected}" in message


def test_a_value_that_is_left_out_is_upstreams_default(folder: Path) -> None:
    missing = Damage(("num_heads",), MISSING)  # which is 8, as here
    assert outcome(folder, TEXT, missing) == ""


def test_no_published_config_is_refused() -> None:
    for plugin in model_plugins():
        for published in plugin.variants.values():
            if not published.configs:
                continue
            configs = published.read(folder_of(plugin.name))
            for component, config in configs.items():
                pair = configs["model_index"].get(component)
                if not isinstance(pair, list) or "tokenizer" in component:
                    continue
                library = diffusers if pair[0] == "diffusers" else transformers
                cls = getattr(library, pair[1])
                check_config(cls, config, component, None)


def test_upstreams_own_defaults_are_not_refused() -> None:
    """As JSON has them: lists of lists in place of tuples of tuples."""
    nested = 0
    for name in dir(diffusers):
        cls = getattr(diffusers, name)
        kinds = diffusers.ModelMixin, diffusers.SchedulerMixin
        if not (isinstance(cls, type) and issubclass(cls, kinds)):
            continue
        defaults = {
            field: parameter.default
            for field, parameter in inspect.signature(cls.__init__).parameters.items()
            if isinstance(parameter.default, int | float | str | list | tuple)
        }
        written = json.loads(json.dumps(defaults))
        nested += "[[" in json.dumps(written)
        check_config(cls, written, name, None)
    assert nested > 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "' + "x" * (17 << 20) + '"}', "is larger than 16 MiB"),
        ("[" * 10**6, "is not JSON, or is cut short (maximum recursion"),
        ("1" * 10**5, "is not JSON, or is cut short (Exceeds the limit"),
    ],
    ids=["large", "deep", "long"],
)
def test_what_is_read_is_bounded(folder: Path, text: str, expected: str) -> None:
    file = folder / VAE
    file.write_text(text)
    with pytest.raises(WeightsError) as caught:
        Checkpoint(folder, "x").config("vae")
    assert str(caught.value).startswith(f"{file}: {expected}")


@pytest.mark.slow
@pytest.mark.parametrize("file", CONFIGS)
def test_configs_drawn_by_a_seed(folder: Path, file: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for damage in sample(found(folder, file), 200, random.Random(seed)):
        message = outcome(folder, file, damage)
        if message:
            assert_clear(message, file, damage)
