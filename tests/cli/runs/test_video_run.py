"""``tpuport`` on a pipeline that no plugin is for: its folder is enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tpuport
from tests.cli.tools import ASKED, UPSTREAM, Cli, example
from tests.core.files.videos import read_back, sound_of
from tests.core.heard import Heard
from tests.processes import Once
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs import replayed
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.pipelines import folder as pipelines
from tpuport.core.pipelines import sidecar
from tpuport.core.reports import Reporter
from tpuport.core.seam import program_runs

#: What ASKED says, as keywords of upstream's call.
CALL = {
    "prompt": "a fox runs",
    "negative_prompt": "blurry",
    "height": 16,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "max_sequence_length": 16,
    "output_type": "np",
}


#: A scheduler as LoRAs of few steps need it.
FEW_STEPS = (
    "UniPCMultistepScheduler:use_flow_sigmas=true,prediction_type=flow_prediction,"
    "flow_shift=5.5"
)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def upstreams(folder: Path) -> Any:
    """Upstream's own pipeline."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pixels(folder: str | Path) -> np.ndarray:
    """The frames in a folder, of 0 to 255."""
    files = sorted(Path(folder).glob("*.png"))
    return np.stack([np.asarray(Image.open(file), int) for file in files])


def test_a_folder_and_a_prompt_make_upstreams_video(cli: Cli, folder: Path) -> None:
    """Also: the mesh is used, and the sidecar makes the frames again."""
    ran = cli.good(
        *("generate", "--weights", folder, *ASKED, "--seed", "3,4", "--json"),
        *("--mesh", "dp=1,sp=2", "--out", "frames/"),
    )
    assert "making 2 videos by WanPipeline: 32x16, 5 frames at 10 fps" in ran.err
    assert len(ran.err.splitlines()) <= 20
    document = ran.json
    assert document["pipeline"] == "WanPipeline"
    assert document["calls"]["transformer"] == 1
    assert {p["state"] for p in document["patches"]} >= {"applied"}
    upstream = upstreams(folder)
    for video, seed in zip(document["videos"], (3, 4), strict=True):
        frames = upstream(**CALL, generator=drawn(seed)).frames[0]
        assert np.abs(pixels(video["path"]) - np.rint(frames * 255)).max() <= 1
    again = cli.good("replay", document["videos"][1]["path"], "--out", "again.gif")
    assert "the same frames as " in again.last
    assert read_back("again.gif")[:3] == (5, 16, 32)


def test_noise_a_scheduler_and_places_of_ones_own(cli: Cli, folder: Path) -> None:
    """Noise from a file, another scheduler, an encoder on the host; and a replay."""
    noise = torch.randn(2, 16, 2, 2, 4, generator=torch.Generator().manual_seed(9))
    save_file({"noise": noise}, "noise.safetensors")
    ran = cli.good(
        *("generate", "--weights", folder, *ASKED, "--seed", "3,4", "--json"),
        *("--latents", "noise.safetensors", "-o", f"scheduler={FEW_STEPS}"),
        *("--encode-on", "host", "--vae-tiling", "on", "--out", "frames/"),
    )
    document = ran.json
    assert "text_encoder" not in document["calls"]
    upstream = upstreams(folder)
    upstream.vae.enable_tiling()
    upstream.scheduler = diffusers.UniPCMultistepScheduler.from_config(
        upstream.scheduler.config,
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        flow_shift=5.5,
    )
    frames = upstream(**CALL, latents=noise[1:]).frames[0]
    place = document["videos"][1]["path"]
    assert np.abs(pixels(place) - np.rint(frames * 255)).max() <= 1
    again = cli.good("replay", place)
    assert "the same frames as " in again.last


def index(folder: Path, **changes: Any) -> None:
    """Change ``model_index.json``."""
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


WRONG = {
    "an option": (("--option", "max_sequence_lenght=3"), "did you mean max_seq"),
    "a kind": (("--option", "guidance_scale_2=much"), "guidance_scale_2"),
    "tpuport's own": (
        ("--option", "output_type=pil"),
        "output_type: tpuport sets output_type by itself",
    ),
    "a generator": (("--option", "generator=1"), "use --seed"),
    "a callback": (
        ("--option", "callback_on_step_end=3"),
        "callback_on_step_end cannot be given on the command line",
    ),
    "a tensor": (
        ("--option", "prompt_embeds=1"),
        "prompt_embeds takes a tensor, which cannot be given on the command line",
    ),
    "no name": (("--option", "zzz=1"), "zzz: WanPipeline has no such parameter; "),
    "a prompt twice": (("--option", "prompt=a dog"), "was given by a flag too"),
    "two videos a file": (("--option", "num_videos_per_prompt=2"), "--seed 1,2"),
    "an image": (("--image", "x.png"), "WanPipeline takes none"),
    "a variant": (("--variant", "5b"), "has no variant 5b; it has 2.1-t2v-1.3b"),
    "a scheduler": (
        ("--option", "scheduler=clock"),
        "takes FlowMatchEulerDiscreteScheduler",
    ),
    "a scheduler's value": (
        ("--option", "scheduler=checkpoint:shft=3"),
        "'shft=3' is no NAME=VALUE of FlowMatchEulerDiscreteScheduler's config; did",
    ),
    "no component": (
        ("--on-host", "x"),
        "WanPipeline has text_encoder, transformer, vae",
    ),
    "no module": (
        ("--on-host", "scheduler"),
        "--on-host scheduler: scheduler is no module",
    ),
    "a component of upstream's": (
        ("--on-host", "vae", "--backend", "diffusers"),
        "--on-host: is not for --backend diffusers",
    ),
    "a mesh": (("--mesh", "sp=99"), "99"),
    "heads": (("--mesh", "tp=3"), "3 divides neither the 2 heads nor"),
    "a size": (("--size", "33x16"), "33"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_pipeline_does_not_take_is_refused(
    name: str, cli: Cli, folder: Path
) -> None:
    more, told = WRONG[name]
    Image.new("RGB", (32, 32)).save("x.png")
    ran = cli("generate", "--weights", folder, *ASKED, *more)
    assert ran.code == 2, ran.err
    assert ran.last.startswith("error: ")
    assert told in ran.last
    assert len(ran.last) <= 310
    assert "..." not in ran.last
    assert not list(Path().glob("*.mp4"))


def test_a_picture_that_is_needed_is_asked_for(cli: Cli, copied: Path) -> None:
    index(copied, _class_name="WanImageToVideoPipeline")
    asked = ("generate", "--weights", copied, *ASKED)
    last = "WanImageToVideoPipeline needs image; add --image FILE"
    for given, told in (((), last), (("--image", "a.png"), "a.png does not exist")):
        ran = cli(*asked, *given)
        assert ran.code == 2
        assert told in ran.last


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no such class": ({"_class_name": "WanPipelin"}, "did you mean WanPipeline"),
    "its own code": ({"_class_name": ["mine", "Pipe"]}, "code of its own"),
    "no pipeline": ({"_class_name": "AutoencoderKLWan"}, "not a pipeline"),
    "another library": ({"vae": ["mine", "VAE"]}, "vae as mine.VAE"),
    "no denoiser": ({"transformer": [None, None]}, "has null for transformer"),
    "no such component": ({"vae": ["diffusers", "AutoencoderKLWann"]}, "AutoencoderK"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_folder_that_cannot_be_run_is_one_line(
    name: str, cli: Cli, copied: Path
) -> None:
    changes, told = DAMAGED[name]
    index(copied, **changes)
    ran = cli("generate", "--weights", copied, *ASKED)
    assert ran.code == 1, ran.err
    assert told in ran.last
    assert str(copied) in ran.last


def test_a_replay_knows_an_empty_negative_prompt_from_none(
    cli: Cli, folder: Path
) -> None:
    """Upstream has long defaults for what is not given."""
    asked = ("--size", "32x16", "--frames", "1", "--steps", "1", *UPSTREAM[-2:])
    for given in ((), ("--negative-prompt", "")):
        run = ("generate", "--weights", folder, "--prompt", "a", *asked, *given)
        assert cli(*run, "--out", "x.gif", "--overwrite").code == 0
        request = read_sidecar(Path("x.gif.json"))["request"]
        assert request["prompts"] == ["a"]
        recorded: Any = sidecar.read(Path("x.gif.json"))
        again = replayed._recorded(Path("x.gif.json"), recorded, Settings())
        assert again.prompt == ("a",)
        assert again.negative_prompt == ("" if given else None)
    # A sidecar from before may have an empty prompt.
    old = {**recorded, "request": {**recorded["request"], "prompts": [""]}}
    again = replayed._recorded(Path("x.gif.json"), cast("Any", old), Settings())
    assert again.prompt == ("",)


def test_programs_that_were_compiled_ahead_run(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are not needed; nothing is compiled again; another run is refused.

    So are programs between the calls of modules, for which the tensors are small.
    """
    monkeypatch.setattr(program_runs, "FEWEST", 1)
    bare = Path(shutil.copytree(folder, "bare"))
    for file in bare.rglob("*.safetensors"):
        file.unlink()
    on = ("--mesh", "sp=2")
    made = cli.good(
        "compile", "--weights", bare, *ASKED, *on, "--out", "built", "--json"
    )
    run = ("generate", "--weights", folder, *ASKED, "--seed", "3", "--json")
    ran = cli.good(*run, *on, "--executables", "built", "--out", "built.gif")
    report = ran.json["report"]
    programs = [one for stage in report["stages"] for one in stage["compiles"]]
    assert "arithmetic" in {one["stage"] for one in programs}
    assert len(programs) == len(made.json["programs"])
    assert all(one["loaded"] for one in programs)
    python = loaded_from_python(folder, "built")
    assert python == len(programs)
    config = bare / "transformer" / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    for file in folder.rglob("*.safetensors"):
        shutil.copy(file, bare / file.relative_to(folder))
    other = ("--weights", bare)
    for more, told in (
        (("--mesh", "sp=4"), "sp=2,tp=1 -> dp=1,sp=4"),
        ((*on, "--dtype", "bfloat16"), "dtype float32 -> bfloat16"),
        ((*on, *other), "eps 1e-06 -> 1e-05"),
    ):
        ran = cli(*run, *more, "--executables", "built", "--out", "other.gif")
        assert ran.code == 1, ran.err
        assert told in ran.last


def loaded_from_python(folder: Path, built: str) -> int:
    """How many programs ``port(executables=...)`` loads; none is compiled."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    told = Heard()

    def video() -> Any:
        return pipe(**CALL, generator=drawn(3)).frames[0]

    expected = video()
    with tpuport.ported(pipe, mesh="sp=2", executables=built, reporter=told):
        found = video()
    assert np.abs(found - expected).max() < 1e-4
    assert all(report.loaded for report in told.reports)
    return len(told.reports)


def test_a_pipeline_of_blocks_is_run_and_replayed(cli: Cli, once: Once) -> None:
    """Its guidance is a component; what a call takes are the inputs of its blocks."""

    folder = example(once, "WanModularPipeline")
    run = ("generate", "--weights", folder, *ASKED, "--guidance", "3", "--seed", "3")
    cli.good(*run, "--mesh", "sp=2", "--out", "frames/", "--json")
    upstream = diffusers.ModularPipeline.from_pretrained(folder)
    upstream.load_components(local_files_only=True)
    upstream.update_components(guider=type(upstream.guider)(guidance_scale=3.0))
    (frames,) = upstream(**CALL, generator=drawn(3), output="videos")
    assert np.abs(pixels("frames") - np.rint(np.asarray(frames) * 255)).max() <= 1
    cli.good("replay", "frames")
    cli.refused("did you mean max_sequence_length", *run, "--option", "max_length=3")


def test_a_list_that_is_a_setting_of_blocks_is_whole(tmp_path: Path) -> None:
    """Not taken for a component, and not cut as the entry of one is."""
    levels = [1.0, 0.9, 0.7, 0.4]
    name = "Cosmos3DistilledModularPipeline"
    content = {"_class_name": name, "distilled_sigmas": levels}
    content["_blocks_class_name"] = "Cosmos3DistilledBlocks"
    (tmp_path / "modular_model_index.json").write_text(json.dumps(content))
    found = pipelines.PipelineFolder.find(tmp_path, Reporter())
    assert found.components() == {}
    assert found.put_together({}).config.distilled_sigmas == levels


def test_a_pipeline_of_blocks_makes_a_video_with_upstreams_sound(
    cli: Cli, once: Once
) -> None:
    folder = example(once, "LTX2ModularPipeline")
    cli.good(
        *("generate", "--weights", folder, "--backend", "diffusers", "--steps", "1"),
        *("--prompt", "a fox", "--size", "32x32", "--frames", "5", "--out", "fox.mp4"),
        *("--option", "max_sequence_length=32", "--seed", "3"),
    )
    upstream = diffusers.ModularPipeline.from_pretrained(folder)
    upstream.load_components(local_files_only=True)
    expected = upstream(
        prompt="a fox",
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=1,
        max_sequence_length=32,
        generator=drawn(3),
        output="audio",
    )[0].numpy()
    rate = upstream.vocoder.config.output_sampling_rate
    found = sound_of(Path("fox.mp4"), rate)
    count = expected.shape[-1]
    assert 0 <= found.shape[1] - count <= 2048  # whole blocks of the codec
    # What the codec keeps of noise is as loud.
    loud = [float(np.abs(one).mean()) for one in (found[:, :count], expected)]
    assert loud[0] == pytest.approx(loud[1], rel=0.2)


def test_a_package_that_is_missing_is_named(
    cli: Cli, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = pipelines.__name__ + ".absent_packages"
    monkeypatch.setattr(called, lambda classes: ["ftfy"])
    ran = cli("generate", "--weights", copied, *ASKED)
    assert ran.code == 1
    assert ran.last.endswith("pip install ftfy")
