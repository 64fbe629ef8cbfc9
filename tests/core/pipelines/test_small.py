"""A pipeline is made small from its class name, or from configs of its full size."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from tests.pipelines.example import all_examples, made, saved
from tpuport.core.drive.rehearsal import without_weights
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.pipelines.small import (
    as_text,
    of_class,
    of_folder,
    small,
    with_more_channels,
)
from tpuport.core.pipelines.stand_in import write_configs, write_random
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import modules_of
from tpuport.core.spec import outside
from tpuport.errors import UsageError

LTX = Path(__file__).parents[3] / "docs/example/ltx_small.json"
NAMES = (
    "WanPipeline",
    "LTXPipeline",
    "CogVideoXPipeline",
    "HunyuanVideoPipeline",
    "MochiPipeline",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_name_is_enough(name: str, tmp_path: Path) -> None:
    configs = of_class(name)
    full, little = configs["transformer"], small(configs)["transformer"]
    assert little["num_layers"] == 2 < full["num_layers"]
    assert little["attention_head_dim"] == full["attention_head_dim"]
    write_configs(tmp_path, small(configs))
    folder = PipelineFolder.find(tmp_path, Reporter())
    pipeline = without_weights(folder, torch.float32)
    assert type(pipeline).__name__ == name
    sizes = [p.numel() for m in modules_of(pipeline).values() for p in m.parameters()]
    assert sum(sizes) < 100e6
    assert json.loads(as_text(configs)) == configs


def test_what_is_no_pipeline_opens_no_package() -> None:
    with pytest.raises(UsageError, match="json:JSONDecoder is no pipeline"):
        of_class("json:JSONDecoder")
    assert outside.module_named("json") is None


def test_the_text_of_a_unet_is_as_wide_as_the_class_says() -> None:
    """And a scheduler that may be one of many is the first of them."""
    configs = of_class("TextToVideoSDPipeline")
    width = configs["unet"]["cross_attention_dim"]
    assert configs["text_encoder"]["hidden_size"] == width == 1024
    assert configs["model_index"]["scheduler"] == ["diffusers", "DDIMScheduler"]


def test_all_layers_are_few_and_their_numbers_are_cut() -> None:
    """But for those of a text encoder that are read."""
    found = small(of_class("AuraFlowPipeline"))["transformer"]
    assert (found["num_mmdit_layers"], found["num_single_dit_layers"]) == (2, 2)
    assert small(of_class("WanVACEPipeline"))["transformer"]["vace_layers"] == [0]
    index = {"transformer": ["diffusers", "Krea2Transformer2DModel"]}
    configs = {"model_index": index, "transformer": {"num_text_layers": 12}}
    assert small(configs)["transformer"] == {"num_text_layers": 12}


def test_an_autoencoder_has_the_channels_that_the_denoiser_takes() -> None:
    configs = of_class("CogView3PlusPipeline")
    assert configs["vae"]["latent_channels"] == 16


@pytest.mark.parametrize("name", ["WanImageToVideo", "CogVideoXImageToVideo"])
def test_a_denoiser_that_joins_a_picture_has_more_channels(name: str) -> None:
    """Twice the latents, and a mask, in the order of trials; no class says which."""
    configs = of_class(f"{name}Pipeline")
    known = [one["transformer"]["in_channels"] for one in with_more_channels(configs)]
    assert configs["transformer"]["in_channels"] == 16
    assert known == [36, 32, 33, 17]
    assert [*with_more_channels(of_class("HunyuanVideo15Pipeline"))] == []  # 65 of 32


def test_an_encoder_of_pictures_gives_what_the_denoiser_takes() -> None:
    """A class that names none takes what the encoder gives."""
    found = of_class("StableVideoDiffusionPipeline")
    assert found["image_encoder"]["projection_dim"] == 1024
    assert found["model_index"]["feature_extractor"][1] == "CLIPImageProcessor"
    assert found["feature_extractor"]["crop_size"]["height"] == 224
    found = of_class("ChronoEditPipeline")
    width = found["image_encoder"]["hidden_size"]
    assert found["transformer"]["image_dim"] == width == 768


def test_of_several_autoencoders_one_fits_the_denoiser() -> None:
    index = of_class("SanaVideoPipeline")["model_index"]
    assert index["vae"] == ["diffusers", "AutoencoderKLWan"]


def test_a_language_model_that_sees_is_small_and_turns_by_three_axes() -> None:
    found = small(of_class("Kandinsky5T2VPipeline"))["text_encoder"]
    text = found["text_config"]
    assert (text["hidden_size"], text["num_hidden_layers"]) == (3584, 2)
    assert sum(text["rope_parameters"]["mrope_section"]) == 3584 // 2 // 2
    assert found["vision_config"]["depth"] == 2


def test_a_setting_that_is_a_mapping_is_no_component() -> None:
    assert "id2label" not in of_class("DiTPipeline")["model_index"]


def test_a_component_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    configs = json.loads(LTX.read_text())
    configs["transformer"]["num_attention_heads"] = "two"
    with pytest.raises(ValueError, match="transformer, a LTXVideoTransformer3DModel: "):
        write_random(tmp_path, configs)


def test_no_weight_hides_what_a_port_does_with_it(tmp_path: Path) -> None:
    """Ones of a norm hide that the norm is turned wrongly, zeros all before them."""
    write_random(tmp_path, json.loads(LTX.read_text()))
    weights = load_file(next((tmp_path / "transformer").glob("*.safetensors")))
    norms = [name for name in weights if "norm" in name]
    assert norms
    assert [n for n, w in weights.items() if w.numel() > 1 and w.std() == 0] == []


def test_a_folder_has_the_configs_of_its_components(tmp_path: Path) -> None:
    """Also: a text encoder's vocabulary is that of the tokenizer that stands in."""
    folder = saved(made(all_examples()["LTXPipeline"])[0], tmp_path / "ltx")
    configs = of_folder(folder)
    assert {*configs} == {
        *("model_index", "scheduler", "text_encoder", "transformer", "vae")
    }
    assert configs["transformer"]["num_attention_heads"] == 4
    found = small(configs)
    assert found["transformer"]["num_attention_heads"] == 2
    assert found["text_encoder"]["d_model"] == configs["text_encoder"]["d_model"]
    write_configs(tmp_path / "small", found)
    assert diffusers.DiffusionPipeline.load_config(tmp_path / "small")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WanPipelin", r"diffusers 0\.\d+\.\d+ has no WanPipelin; did you mean WanPip"),
        ("WanTransformer3DModel", "is no pipeline of diffusers"),
        ("DiffusionPipeline", "is no pipeline of diffusers"),
        ("Krea2Pipeline", "nothing says how wide text_encoder is"),
        ("MotifVideoPipeline", "no stand-in for a PreTrainedTokenizerBase; add --w"),
        ("ConsisIDPipeline", "needs a package that .*: pip install opencv-python"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        of_class(name)
