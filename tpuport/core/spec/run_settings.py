"""Every setting, declared once: its kind, its default, its flag and the flag's help.

A field of :class:`Asked` or :class:`RunSettings` is a flag of the commands that it
names, and a key of their YAML files. :func:`tpuport.port` takes some as keywords. To
add a flag, add a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from tpuport.core.enums import (
    Backend,
    Blocks,
    Dtype,
    Place,
    StageName,
    Tiling,
    WeightsOn,
)
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec import kinds
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.weights.sharding import DEFAULT_LAYOUT
from tpuport.errors import UsageError, quoted
from tpuport.kernels.attention.choice import AttentionChoice

#: The commands by their letters, as docs/cli.md has them.
COMMANDS = {
    "G": "generate",
    "E": "encode",
    "N": "denoise",
    "D": "decode",
    "R": "replay",
    "L": "runs",
    "S": "resume",
    "K": "runs clean",
    "P": "plan",
    "C": "compile",
    "B": "bench",
    "A": "bench attention",
    "T": "tune",
    "O": "doctor",
    "M": "models",
    "U": "plugins",
    "X": "patches",
    "Y": "scan",
    "H": "check",
    "W": "new-model",
    "Q": "batch",
    "V": "serve",
    "J": "submit",
}

#: The panels of a help text, in order; ``None`` has what most runs name.
WHAT, WHERE = "More of what to make", "How to run it"
FILES, INSIDE, EVERY = "Files", "Look inside", "Of every command"
PANELS = (None, WHAT, WHERE, FILES, INSIDE, EVERY)

#: What stands for the built-in checkpoint, in place of a hub id or a folder.
DEMO = "demo"

#: Of a cache folder: where compiled programs are kept.
COMPILED = "compiled"

#: Calls of a stage in a trace: enough to see one after another, and still small.
PROFILED_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a field beside its default.

    Attributes:
        kind: from text, YAML or Python values to the field's type.
        help: of the flag.
        flags: such as ``("--steps", "--num-inference-steps")``.
        commands: that have it, as letters of :data:`COMMANDS`.
        panel: of the help text.
        takes: what the parser of the command line makes of the flag's text.
        metavar, envvar: as Typer has them.
        becomes: the fields that a value stands for, where the setting says others in
            other words and is none itself.
    """

    kind: kinds.Kind
    help: str
    flags: tuple[str, ...]
    commands: str
    panel: str | None = None
    takes: Any = str
    metavar: str | None = None
    envvar: str | None = None
    becomes: Callable[[Any], dict[str, Any]] | None = None

    @property
    def key(self) -> str:
        """In YAML, and among the parameters of a command."""
        return _key(self.flags[0])

    @property
    def keys(self) -> tuple[str, ...]:
        """All spellings in YAML: those of the flags, and plurals of lists."""
        long = tuple(_key(flag) for flag in self.flags if flag.startswith("--"))
        return (*long, f"{long[0]}s") if self.takes == list[str] else long


#: The kinds of one value or several.
_SEVERAL = (
    *(kinds.texts, kinds.prompts, kinds.seeds, kinds.options, kinds.stages),
    kinds.loras,
)
#: Kind -> what the parser of the command line makes of a text, where that is no text.
_TAKES: dict[kinds.Kind, Any] = {
    kinds.positive: int,
    kinds.number_from_0: int,
    **dict.fromkeys((kinds.number, kinds.number_over_0, kinds.share), float),
    kinds.flag: bool,
    **dict.fromkeys(_SEVERAL, list[str]),
}


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def in_words(words: str) -> tuple[tuple[str, ...], str | None]:
    """The flags of ``"--option -o N=V"``, and what a help text calls their value."""
    flags = tuple(word for word in words.split() if word.startswith("-"))
    return flags, next((w for w in words.split() if w not in flags), None)


def setting(
    kind: kinds.Kind, words: str, help: str, default: Any = None, **more: Any
) -> Any:
    """A field that is a flag.

    Args:
        words: as of :func:`in_words`.
        more: as :class:`Setting` has it.
    """
    flags, metavar = in_words(words)
    known = {"takes": _TAKES.get(kind, str), "metavar": metavar, **more}
    made = Setting(kind=kind, help=help, flags=flags, **known)
    about = {"kind": kind, "setting": made}
    if more.get("becomes") is not None:
        return field(
            default=None, init=False, repr=False, compare=False, metadata=about
        )
    if default is dict:
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def python_only(kind: kinds.Kind, default: Any) -> Any:
    """A field without a flag."""
    return field(default=default, metadata={"kind": kind})


#: The flags of a panel, with the commands that most of them have.
what = partial(setting, panel=WHAT, commands="GEPCB")
how = partial(setting, panel=WHERE, commands="GENDPCB")
file = partial(setting, panel=FILES)
inside = partial(setting, panel=INSIDE, commands="GEND")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to make, as it was asked for; ``None`` is left to the variant or upstream.

    The help of each flag says what the field does.

    Attributes:
        prompt: each is made with each ``seed``.
        image, video: a path.
        aspect_ratio: (height, width).
    """

    prompt: tuple[str, ...] = what(
        kinds.prompts,
        "--prompt TEXT",
        "What to show; may be repeated for several videos.",
        panel=None,
        default=(),
        commands="GEPCJ",
    )
    prompt_file: None = what(
        kinds.path,
        "--prompt-file FILE",
        "Prompts, one a line; # begins a comment.",
        becomes=lambda path: {"prompt": kinds.read_prompts(path)},
        commands="GEC",
    )
    negative_prompt: str | None = what(
        kinds.text,
        "--negative-prompt",
        "What to steer away from, for all prompts.",
        commands="GEPCJ",
    )
    size: None = what(
        kinds.size,
        "--size WxH",
        "Pixels, such as 720x480.",
        panel=None,
        becomes=lambda size: {"width": size[0], "height": size[1]},
        commands="GEPCBJ",
    )
    height: int | None = what(kinds.positive, "--height", "Pixels, in place of --size.")
    width: int | None = what(kinds.positive, "--width", "Pixels, in place of --size.")
    num_frames: int | None = what(
        kinds.positive,
        "--frames --num-frames",
        "Number of frames, such as 4n+1.",
        panel=None,
        commands="GEPCBJ",
    )
    fps: float | None = what(
        kinds.number_over_0,
        "--fps",
        "Frames per second of the written file.",
        commands="GEJ",
    )
    num_inference_steps: int | None = what(
        kinds.positive,
        "--steps --num-inference-steps",
        "Number of denoising steps.",
        panel=None,
        commands="GEPCBJ",
    )
    guidance_scale: float | None = what(
        kinds.number,
        "--guidance --guidance-scale",
        "Guidance scale; at most 1 turns it off.",
        commands="GEPCBJ",
    )
    seed: tuple[int, ...] = what(
        kinds.seeds,
        "--seed N",
        'Or several, as "1,2,3"; may be repeated. (default: 0)',
        panel=None,
        default=(0,),
        commands="GEJ",
    )
    image: str | None = what(
        kinds.media, "--image FILE", "Start from this image.", commands="GERPCBJ"
    )
    video: str | None = what(
        kinds.media, "--video FILE", "Start from this video, or folder of frames."
    )
    strength: float | None = what(
        kinds.share, "--strength", "With --video: share of the steps run, in (0, 1]."
    )
    resolution: str | None = what(
        kinds.size_class,
        "--resolution NAME",
        "Size class such as 480p, in place of --size.",
    )
    aspect_ratio: tuple[float, float] | None = what(
        kinds.aspect_ratio,
        "--aspect-ratio W:H",
        "Shape within the size class, such as 16:9.",
    )
    step_cache: StepCache | None = what(
        kinds.step_cache,
        "--cache METHOD[:OPTIONS]",
        "deepcache or taylorseer: faster, but not exact.",
    )
    options: Mapping[str, Any] = what(
        kinds.options,
        "--option -o NAME=VALUE",
        "Any other setting; may be repeated.",
        default=dict,
        commands="GEPCBJHW",
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How to run, whatever is made; ``None`` is left to the devices or the variant.

    The help of each flag says what the field does. From Python there is more to say of:

    Attributes:
        weights: a hub id, or a folder in the diffusers layout.
        lora: fused into the weights one after the other, each as its text says.
        mesh: also a mapping, or (dp, sp, tp).
        dtype: also torch's, jax's or NumPy's own.
        cache_dir: of this machine; as a keyword also an address, which becomes
            ``cache_store``.
        cache_store: keeps compiled programs, and weights that came from the hub.
        compile_cache: keep compiled programs there, or else in ``cache_dir``.
        profile_calls: ``None`` for :data:`PROFILED_CALLS`.
        no_jit: the stage that runs op by op, or several.
    """

    model: str | None = setting(
        kinds.text,
        "--model NAME",
        "See `tpuport models`. (default: {DEFAULT_MODEL})",
        commands="GEPCBJ",
    )
    variant: str | None = setting(
        kinds.text,
        "--variant NAME",
        "A published version, such as 5b; see `tpuport models`.",
        commands="GEPCB",
    )
    weights: str | Path | None = setting(
        kinds.weights,
        "--weights ID|FOLDER",
        "Hub id or folder, of any pipeline of diffusers.",
        commands="GENDRSPCBHW",
    )
    lora: tuple[LoraChoice, ...] = setting(
        kinds.loras,
        "--lora FILE|ID[:SCALE]",
        "Add a LoRA to the weights; may be repeated.",
        default=(),
        commands="GENDRSBJ",
        panel=WHAT,
    )
    mesh: MeshSpec | None = how(
        kinds.mesh,
        "--mesh MESH",
        "Split batches (dp), tokens (sp), weights (tp): dp=2,tp=4. "
        "(default: one CPU, or all chips)",
        commands="GENDCB",
    )
    dtype: Dtype | None = how(
        kinds.dtype,
        "--dtype NAME",
        "float32 or bfloat16. (default: float32 on CPUs)",
    )
    attention: AttentionChoice = how(
        kinds.attention,
        "--attention NAME[:OPTIONS]",
        "auto, reference, blockwise, or splash on TPUs.",
        default=AttentionChoice(),
    )
    sharding: str = how(
        kinds.text,
        "--sharding LAYOUT",
        "How weights are split; see `tpuport models`.",
        default=DEFAULT_LAYOUT,
    )
    weights_on: WeightsOn = how(
        kinds.weights_on,
        "--weights-on PLACE",
        "auto, chip or host: blocks stream from there.",
        default=WeightsOn.AUTO,
    )
    blocks: Blocks = how(
        kinds.blocks,
        "--blocks native|upstream",
        "Blocks written for the chip, or upstream's own.",
        default=Blocks.NATIVE,
    )
    vae: str = how(
        kinds.text,
        "--vae NAME",
        "Another autoencoder; see `tpuport models`.",
        default=TORCHAX,
    )
    vae_tiling: Tiling | None = how(
        kinds.tiling,
        "--vae-tiling on|off",
        "Decode in tiles: less memory, other seams.",
        commands="GEDPC",
    )
    encode_on: Place = how(
        kinds.place,
        "--encode-on device|host",
        "Where the text encoder runs. (default: device)",
        default=Place.DEVICE,
        commands="GEC",
    )
    backend: Backend = how(
        kinds.backend,
        "--backend tpuport|diffusers",
        "diffusers runs plain upstream code.",
        default=Backend.TPUPORT,
        commands="GEND",
    )
    cache_dir: Path | None = python_only(kinds.path, default=None)
    cache_store: StorePath | None = python_only(kinds.any_path, default=None)
    cache: None = file(
        kinds.any_path,
        "--cache-dir FOLDER",
        "Compiled programs, demo checkpoint, unfinished runs.",
        envvar="TPUPORT_CACHE_DIR",
        becomes=lambda place: _cache(place),
        commands="GENDRPCBATOLSKHW",
    )
    compile_cache: bool = python_only(kinds.flag, default=True)
    no_compile_cache: None = file(
        kinds.flag,
        "--no-compile-cache",
        "Neither read nor keep compiled programs.",
        becomes=lambda off: {"compile_cache": not off},
        commands="GENDRB",
    )
    executables: AnyPath | None = file(
        kinds.any_path,
        "--executables FOLDER",
        "Run the programs that `tpuport compile` made.",
        commands="GENDB",
    )
    memory_report: bool = inside(
        kinds.flag,
        "--memory-report",
        "Show the bytes on each device for every call.",
        default=False,
    )
    profile: Path | None = inside(
        kinds.path, "--profile FOLDER", "Record steady calls, for XProf or Perfetto."
    )
    profile_calls: int | None = inside(
        kinds.positive,
        "--profile-calls N",
        f"Calls of each stage to record. (default: {PROFILED_CALLS})",
    )
    no_jit: tuple[StageName, ...] = inside(
        kinds.stages,
        "--no-jit",
        "Run op by op, to debug; much slower.",
        default=(),
        takes=bool,
    )
    no_jit_stage: None = inside(
        kinds.stages,
        "--no-jit-stage STAGE",
        "Run this stage op by op; may be repeated.",
        becomes=lambda stages: {"no_jit": stages},
        commands="G",
    )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Settings of Python values; raises as of :func:`typed`."""
        if given.get("cache_dir") is not None:
            place = read_value(kinds.any_path, given["cache_dir"], "cache_dir")
            others = {n: v for n, v in given.items() if n != "cache_dir"}
            given = {**others, **_cache(place)}
        return cls(**typed(cls, given))

    @property
    def compiled_dir(self) -> AnyPath | None:
        """Where compiled programs are kept; ``None`` where they are not."""
        place = self.cache_store or self.cache_dir
        return place / COMPILED if place is not None and self.compile_cache else None


def _cache(place: AnyPath) -> dict[str, Any]:
    """The fields that a place for the cache stands for."""
    store = isinstance(place, StorePath)
    return {
        "cache_dir": None if store else place,
        "cache_store": place if store else None,
    }


def typed(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of fields, typed; ``None`` is "not given".

    Raises:
        UsageError, MeshError, AttentionError: a value is wrong in itself, or of no
            setting.
    """
    about = {f.name: f.metadata["kind"] for f in fields(cls) if f.init and f.metadata}
    if unknown := given.keys() - about.keys():
        raise UsageError(f"there is no setting {quoted(min(unknown))}")
    return {n: read_value(about[n], v, n) for n, v in given.items() if v is not None}


def read_value(kind: kinds.Kind, value: Any, label: str) -> Any:
    """The typed value of one setting.

    Args:
        label: what a message calls it.

    Raises:
        UsageError: it is of another kind.
    """
    try:
        return kind(value)
    except UsageError as error:  # it says what was given
        raise type(error)(f"{label}: {error}") from None
    except (TypeError, ValueError) as error:
        alone = kind in _SEVERAL and isinstance(value, list) and len(value) == 1
        shown = value[0] if alone else value
        raise UsageError(f"{label}: {quoted(shown)} {error}") from None


def settings_of(cls: Any) -> dict[str, Setting]:
    """The settings of a class that have a flag, by the name of the field."""
    about = {f.name: f.metadata.get("setting") for f in fields(cls)}
    found = {name: setting for name, setting in about.items() if setting is not None}
    return dict(sorted(found.items(), key=lambda item: PANELS.index(item[1].panel)))


def defaults_of(cls: Any) -> dict[str, Any]:
    """The keywords of Python that a class has, with their defaults."""
    return {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for f in fields(cls)
        if f.init
    }
