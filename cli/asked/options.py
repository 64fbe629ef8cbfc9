"""The options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from tpuport.api import DEFAULT_MODEL
from tpuport.cli.asked.settings import take_own_options
from tpuport.core.run.inspection import PROFILED_CALLS

_WHAT = "What to make"
_WHERE = "How to run it"
_FILES = "Files"
_INSIDE = "Look inside"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"Model plugin; see `tpuport models`. (default: {DEFAULT_MODEL})",
    ),
]
VariantName = Annotated[
    str | None,
    typer.Option(
        "--variant",
        help="Whose defaults and rules hold; without --weights also which "
        "published weights are fetched. See `tpuport models`.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", help="Hub id or diffusers folder. (default: the demo checkpoint)"
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="May be repeated.", rich_help_panel=_WHAT),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompt-file",
        help="One prompt a line; blank lines and # comments are skipped.",
        rich_help_panel=_WHAT,
    ),
]
NegativePrompt = Annotated[
    str | None,
    typer.Option(
        "--negative-prompt",
        help="What to steer away from, for all prompts; needs guidance.",
        rich_help_panel=_WHAT,
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="WxH", help="Such as 720x480.", rich_help_panel=_WHAT
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        "--height", help="Pixels. (default: the variant's)", rich_help_panel=_WHAT
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width", help="Pixels. (default: the variant's)", rich_help_panel=_WHAT
    ),
]
Frames = Annotated[
    int | None,
    typer.Option(
        "--frames",
        "--num-frames",
        help="Of the video; 4n+1, 8n+1 or 16n+1 by model. (default: the variant's)",
        rich_help_panel=_WHAT,
    ),
]
Fps = Annotated[
    float | None,
    typer.Option("--fps", help="Of the written file.", rich_help_panel=_WHAT),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        "--num-inference-steps",
        help="Denoising steps. (default: the variant's)",
        rich_help_panel=_WHAT,
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        "--guidance-scale",
        help="Guidance scale; at most 1 turns it off. (default: the variant's)",
        rich_help_panel=_WHAT,
    ),
]
Seed = Annotated[
    list[str] | None,
    typer.Option(
        "--seed",
        metavar="INT",
        help='May be repeated, or "1,2,3". (default: 0)',
        rich_help_panel=_WHAT,
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="A setting only this model has; may be repeated.",
        rich_help_panel=_WHAT,
    ),
]
Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Start from this image (image to video).",
        rich_help_panel=_WHAT,
    ),
]
SourceVideo = Annotated[
    str | None,
    typer.Option(
        "--video",
        metavar="FILE",
        help="Start from this video, or folder of frames (video to video).",
        rich_help_panel=_WHAT,
    ),
]
Strength = Annotated[
    float | None,
    typer.Option(
        "--strength",
        help="With --video: share of the steps that is run, in (0, 1]. (default: the "
        "variant's)",
        rich_help_panel=_WHAT,
    ),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        metavar="NAME",
        help="Size class such as 480p, for models that have them; in place of --size.",
        rich_help_panel=_WHAT,
    ),
]
AspectRatio = Annotated[
    str | None,
    typer.Option(
        "--aspect-ratio",
        metavar="W:H",
        help="Such as 16:9, within the size class. (default: the image's, or the "
        "variant's)",
        rich_help_panel=_WHAT,
    ),
]
StepCaching = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="METHOD[:NAME=VALUE,...]",
        help="Reuse work between steps: deepcache or taylorseer, such as "
        "deepcache:start=11,end=45,interval=4. Faster, not exact. (default: none)",
        rich_help_panel=_WHAT,
    ),
]
Latents = Annotated[
    str | None,
    typer.Option(
        "--latents",
        metavar="FILE",
        help="Safetensors file with one tensor: the initial noise.",
        rich_help_panel=_WHAT,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Devices for data (dp), sequence (sp) and tensor (tp) parallelism, such "
        "as dp=2,tp=4; one may be -1. (default: one CPU, or all TPU chips)",
        rich_help_panel=_WHERE,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of the weights: float32 or bfloat16. (default: float32 on CPU, else the "
        "variant's)",
        rich_help_panel=_WHERE,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        metavar="NAME[:OPTIONS]",
        help="auto, splash or jax (TPU only), reference or blockwise; for the denoiser "
        "also options, as in 'splash:window=512,512;k_smooth=on;block_q=1024;"
        "block_kv=1024;block_kv_compute=256'. (default: auto)",
        rich_help_panel=_WHERE,
    ),
]
Sharding = Annotated[
    str | None,
    typer.Option(
        "--sharding",
        metavar="LAYOUT",
        help="How weights are split; see `tpuport models`. (default: default)",
        rich_help_panel=_WHERE,
    ),
]
Blocks = Annotated[
    str | None,
    typer.Option(
        "--blocks",
        metavar="native|upstream",
        help="native blocks are written for the chip, on upstream's weights, where a "
        "model has them; upstream runs its own. (default: native)",
        rich_help_panel=_WHERE,
    ),
]
Vae = Annotated[
    str | None,
    typer.Option(
        "--vae",
        metavar="torchax|flax",
        help="The autoencoder: upstream's class, or one in Flax on its weights, where "
        "a model has it; see `tpuport models`. (default: torchax)",
        rich_help_panel=_WHERE,
    ),
]
VaeTiling = Annotated[
    str | None,
    typer.Option(
        "--vae-tiling",
        metavar="auto|on|off",
        help="Decode in overlapping tiles, as upstream's vae.enable_tiling(); another "
        "video, a little. auto does where a device would not hold it otherwise. "
        "(default: auto)",
        rich_help_panel=_WHERE,
    ),
]
EncodeOn = Annotated[
    str | None,
    typer.Option(
        "--encode-on",
        metavar="device|host",
        help="Where the text encoder runs. (default: device)",
        rich_help_panel=_WHERE,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="tpuport|diffusers",
        help="diffusers runs plain upstream code. (default: tpuport)",
        rich_help_panel=_WHERE,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="PATH",
        help=".mp4, .webm, .gif, or a folder of PNGs; several videos are numbered. "
        "(default: MODEL-VARIANT-seedN.mp4)",
        rich_help_panel=_FILES,
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir",
        metavar="FOLDER",
        help="Keep the files of the stages here; `generate` reuses finished ones.",
        rich_help_panel=_FILES,
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        envvar="TPUPORT_CACHE_DIR",
        help="Compiled programs, the demo checkpoint, unfinished runs.",
        rich_help_panel=_FILES,
    ),
]
NoCompileCache = Annotated[
    bool,
    typer.Option(
        "--no-compile-cache",
        help="Neither read nor keep compiled programs.",
        rich_help_panel=_FILES,
    ),
]
Executables = Annotated[
    str | None,
    typer.Option(
        "--executables",
        metavar="FOLDER",
        help="Use the programs that `tpuport compile` put there; refused where they "
        "are for another run.",
        rich_help_panel=_FILES,
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write the full report here: the document of --json.",
        rich_help_panel=_FILES,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with any of these options; flags win.",
        callback=take_own_options,
        is_eager=True,
        rich_help_panel=_FILES,
    ),
]
MemoryReport = Annotated[
    bool,
    typer.Option(
        "--memory-report",
        help="After the run, or where it fails, bytes in use and peak on each device, "
        "for every call of each stage: live where the backend counts them, else "
        "planned.",
        rich_help_panel=_INSIDE,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FOLDER",
        help="Record a trace of calls in steady state of each stage, for XProf or "
        "Perfetto; compiles and first runs are not in it.",
        rich_help_panel=_INSIDE,
    ),
]
ProfileCalls = Annotated[
    int | None,
    typer.Option(
        "--profile-calls",
        metavar="N",
        help=f"With --profile: calls of each stage. (default: {PROFILED_CALLS})",
        rich_help_panel=_INSIDE,
    ),
]
NoJit = Annotated[
    bool,
    typer.Option(
        "--no-jit",
        help="Run op by op, to debug: nothing is compiled, and an error names the "
        "line of its op. Much slower.",
        rich_help_panel=_INSIDE,
    ),
]
NoJitStage = Annotated[
    list[str] | None,
    typer.Option(
        "--no-jit-stage",
        metavar="STAGE",
        help="The same for one stage: encode, denoise or decode; may be repeated.",
        rich_help_panel=_INSIDE,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, for scripts.")
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback and the libraries' log.")
]
