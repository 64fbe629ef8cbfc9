"""Every setting, declared once: its kind, its default, its flag and the flag's help.

A field of :class:`Asked` or :class:`RunSettings` is a flag of the commands that it
names, a key of their YAML files, and a keyword of Python. To add a flag, add a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from tpuport.core.enums import Backend, Blocks, Dtype, Place, StageName, Tiling
from tpuport.core.files.typed import LIMIT_BYTES
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec import kinds
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.step_cache import StepCache
from tpuport.errors import UsageError
from tpuport.kernels.attention.choice import AttentionChoice

#: The commands by their letters, as docs/cli.md has them.
COMMANDS = {
    "G": "generate",
    "E": "encode",
    "N": "denoise",
    "D": "decode",
    "R": "replay",
    "P": "plan",
    "C": "compile",
    "B": "bench",
    "A": "bench attention",
    "T": "tune",
    "O": "doctor",
    "M": "models",
    "U": "plugins",
    "X": "patches",
}

#: The panels of a help text, in order; ``None`` is the first one, without a name.
WHAT, WHERE = "What to make", "How to run it"
FILES, INSIDE = "Files", "Look inside"
PANELS = (None, WHAT, WHERE, FILES, INSIDE)

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


#: Kind -> what the parser of the command line makes of a text, where that is no text.
_TAKES: dict[kinds.Kind, Any] = {
    kinds.positive: int,
    kinds.number: float,
    kinds.flag: bool,
    **dict.fromkeys((kinds.texts, kinds.seeds, kinds.options), list[str]),
}


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def setting(
    kind: kinds.Kind, words: str, help: str, default: Any = None, **more: Any
) -> Any:
    """A field that is a flag.

    Args:
        words: its flags, and what a help text calls its value: ``"--option -o N=V"``.
        more: as :class:`Setting` has it.
    """
    flags = tuple(word for word in words.split() if word.startswith("-"))
    known = {"takes": _TAKES.get(kind, str), **more}
    known["metavar"] = next((w for w in words.split() if w not in flags), None)
    about = {"setting": Setting(kind=kind, help=help, flags=flags, **known)}
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
    """What to make, as it was asked for; ``None`` is left to the variant.

    The help of each flag says what the field does. From Python there is more to say of:

    Attributes:
        prompt: one, or several for one batch.
        negative_prompt: one for all, or one for each.
        fps: recorded with the result; the model does not see it.
        seed: one (one generator for the batch) or one per video.
        image: a path, a PIL image or a uint8 array [Y, X, 3]; or a list with one for
            each video.
        video: a path, a list of PIL images or a uint8 array [F, Y, X, 3]; its first
            ``num_frames`` frames are used.
        aspect_ratio: also (height, width).
    """

    prompt: tuple[str, ...] = what(
        kinds.texts, "--prompt", "May be repeated.", default=(), commands="GEPC"
    )
    prompt_file: None = what(
        kinds.path,
        "--prompt-file",
        "One prompt a line; blank lines and # comments are skipped.",
        becomes=lambda path: {"prompt": read_prompts(path)},
        commands="GEC",
    )
    negative_prompt: str | None = what(
        kinds.text,
        "--negative-prompt",
        "What to steer away from, for all prompts; needs guidance.",
        commands="GEPC",
    )
    size: None = what(
        kinds.size,
        "--size WxH",
        "Such as 720x480.",
        becomes=lambda size: {"width": size[0], "height": size[1]},
    )
    height: int | None = what(
        kinds.positive, "--height", "Pixels. (default: the variant's)"
    )
    width: int | None = what(
        kinds.positive, "--width", "Pixels. (default: the variant's)"
    )
    num_frames: int | None = what(
        kinds.positive,
        "--frames --num-frames",
        "Of the video; 4n+1, 8n+1 or 16n+1 by model. (default: the variant's)",
    )
    fps: float | None = what(
        kinds.number, "--fps", "Of the written file.", commands="GE"
    )
    num_inference_steps: int | None = what(
        kinds.positive,
        "--steps --num-inference-steps",
        "Denoising steps. (default: the variant's)",
    )
    guidance_scale: float | None = what(
        kinds.number,
        "--guidance --guidance-scale",
        "Guidance scale; at most 1 turns it off. (default: the variant's)",
    )
    seed: tuple[int, ...] = what(
        kinds.seeds,
        "--seed INT",
        'May be repeated, or "1,2,3". (default: 0)',
        default=(0,),
        commands="GE",
    )
    image: str | None = what(
        kinds.media, "--image FILE", "Start from this image (image to video)."
    )
    video: str | None = what(
        kinds.media,
        "--video FILE",
        "Start from this video, or folder of frames (video to video).",
    )
    strength: float | None = what(
        kinds.number,
        "--strength",
        "With --video: share of the steps that is run, in (0, 1]. (default: the "
        "variant's)",
    )
    resolution: str | None = what(
        kinds.text,
        "--resolution NAME",
        "Size class such as 480p, for models that have them; in place of --size.",
    )
    aspect_ratio: tuple[float, float] | None = what(
        kinds.aspect_ratio,
        "--aspect-ratio W:H",
        "Such as 16:9, within the size class. (default: the image's, or the variant's)",
    )
    step_cache: StepCache | None = what(
        kinds.step_cache,
        "--cache METHOD[:NAME=VALUE,...]",
        "Reuse work between steps: deepcache or taylorseer, such as "
        "deepcache:start=11,end=45,interval=4. Faster, not exact. (default: none)",
    )
    options: Mapping[str, Any] = what(
        kinds.options,
        "--option -o NAME=VALUE",
        "A setting only this model has; may be repeated.",
        default=dict,
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How to run, whatever is made; ``None`` is left to the devices or the variant.

    The help of each flag says what the field does. From Python there is more to say of:

    Attributes:
        weights: a hub id, or a folder in the diffusers layout.
        mesh: also a mapping, or (dp, sp, tp).
        dtype: also torch's, jax's or NumPy's own.
        compile_cache: keep compiled programs in ``cache_dir``.
        profile_calls: ``None`` for :data:`PROFILED_CALLS`.
        no_jit: the stage that runs op by op, or several.
        keep_loaded: keep weights on the devices between calls of ``generate``.
    """

    model: str | None = setting(
        kinds.text,
        "--model",
        "Model plugin; see `tpuport models`. (default: {DEFAULT_MODEL})",
        commands="GENDPCB",
    )
    variant: str | None = setting(
        kinds.text,
        "--variant",
        "Whose defaults and rules hold; without --weights also which published "
        "weights are fetched. See `tpuport models`.",
        commands="GEPCB",
    )
    weights: str | Path | None = setting(
        kinds.weights,
        "--weights",
        "Hub id or diffusers folder. (default: the demo checkpoint)",
        commands="GENDRPCB",
    )
    mesh: MeshSpec | None = how(
        kinds.mesh,
        "--mesh",
        "Devices for data (dp), sequence (sp) and tensor (tp) parallelism, such as "
        "dp=2,tp=4; one may be -1. (default: one CPU, or all TPU chips)",
        commands="GENDCB",
    )
    dtype: Dtype | None = how(
        kinds.dtype,
        "--dtype",
        "Of the weights: float32 or bfloat16. (default: float32 on CPU, else the "
        "variant's)",
    )
    attention: AttentionChoice = how(
        kinds.attention,
        "--attention NAME[:OPTIONS]",
        "auto, splash or jax (TPU only), reference or blockwise; for the denoiser "
        "also options, as in 'splash:window=512,512;k_smooth=on;block_q=1024;"
        "block_kv=1024;block_kv_compute=256'. (default: auto)",
        default=AttentionChoice(),
    )
    sharding: str = how(
        kinds.text,
        "--sharding LAYOUT",
        "How weights are split; see `tpuport models`. (default: default)",
        default="default",
    )
    blocks: Blocks = how(
        kinds.blocks,
        "--blocks native|upstream",
        "native blocks are written for the chip, on upstream's weights, where a model "
        "has them; upstream runs its own. (default: native)",
        default=Blocks.NATIVE,
    )
    vae: str = how(
        kinds.text,
        "--vae torchax|flax",
        "The autoencoder: upstream's class, or one in Flax on its weights, where a "
        "model has it; see `tpuport models`. (default: torchax)",
        default=TORCHAX,
    )
    vae_tiling: Tiling = how(
        kinds.tiling,
        "--vae-tiling auto|on|off",
        "Decode in overlapping tiles, as upstream's vae.enable_tiling(); another "
        "video, a little. auto does where a device would not hold it otherwise. "
        "(default: auto)",
        default=Tiling.AUTO,
        commands="GDPC",
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
        "diffusers runs plain upstream code. (default: tpuport)",
        default=Backend.TPUPORT,
        commands="GEND",
    )
    cache_dir: Path | None = file(
        kinds.path,
        "--cache-dir FOLDER",
        "Compiled programs, the demo checkpoint, unfinished runs.",
        envvar="TPUPORT_CACHE_DIR",
        commands="GENDRPCBATO",
    )
    compile_cache: bool = python_only(kinds.flag, default=True)
    no_compile_cache: None = file(
        kinds.flag,
        "--no-compile-cache",
        "Neither read nor keep compiled programs.",
        becomes=lambda off: {"compile_cache": not off},
        commands="GENDRB",
    )
    executables: Path | None = file(
        kinds.path,
        "--executables FOLDER",
        "Use the programs that `tpuport compile` put there; refused where they are "
        "for another run.",
        commands="GENDB",
    )
    memory_report: bool = inside(
        kinds.flag,
        "--memory-report",
        "After the run, or where it fails, bytes in use and peak on each device, for "
        "every call of each stage: live where the backend counts them, else planned.",
        default=False,
    )
    profile: Path | None = inside(
        kinds.path,
        "--profile FOLDER",
        "Record a trace of calls in steady state of each stage, for XProf or "
        "Perfetto; compiles and first runs are not in it.",
    )
    profile_calls: int | None = inside(
        kinds.positive,
        "--profile-calls N",
        f"With --profile: calls of each stage. (default: {PROFILED_CALLS})",
    )
    no_jit: tuple[StageName, ...] = inside(
        kinds.stages,
        "--no-jit",
        "Run op by op, to debug: nothing is compiled, and an error names the line of "
        "its op. Much slower.",
        default=(),
        takes=bool,
    )
    no_jit_stage: None = inside(
        kinds.stages,
        "--no-jit-stage STAGE",
        "The same for one stage: encode, denoise or decode; may be repeated.",
        becomes=lambda stages: {"no_jit": stages},
        takes=list[str],
        commands="G",
    )
    keep_loaded: bool = python_only(kinds.flag, default=True)

    @classmethod
    def read(cls, given: Mapping[str, Any], *, named: Callable[[str], str]) -> Self:
        """Typed settings of text, YAML or Python values, by the names of fields.

        Args:
            given: what was given; other fields, and those that are ``None``, have
                their defaults.
            named: how messages spell a field, such as ``--mesh`` or ``mesh``.

        Raises:
            UsageError, MeshError, AttentionError: a value that is wrong in itself.
            TypeError: there is no such field.
        """
        known = {
            f.name: read_value(f.metadata, given[f.name], named(f.name))
            for f in fields(cls)
            if f.init and given.get(f.name) is not None
        }
        if unknown := given.keys() - defaults_of(cls).keys():
            raise TypeError(f"unexpected settings: {', '.join(sorted(unknown))}")
        return cls(**known)

    @property
    def compiled_dir(self) -> Path | None:
        """Where compiled programs are kept; ``None`` where they are not."""
        if self.cache_dir is None or not self.compile_cache:
            return None
        return self.cache_dir / COMPILED

    @property
    def implementations(self) -> dict[str, str]:
        """Component -> the implementation asked for."""
        return {"vae": self.vae}


def read_value(about: Mapping[str, Any], value: Any, label: str) -> Any:
    """The typed value of one setting.

    Args:
        about: the metadata of its field.
        label: what a message calls it.

    Raises:
        UsageError: it is of another kind.
    """
    kind = about["setting"].kind if "setting" in about else about["kind"]
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        shown = value[0] if isinstance(value, list) and len(value) == 1 else value
        raise UsageError(f"{label}: {shown!r} {error}") from None


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


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, one a line.

    Raises:
        UsageError: it cannot be read, or holds none.
    """
    lines = [line.strip() for line in read_text(path, "prompt file").splitlines()]
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise UsageError(
            f"prompt file {path} holds no prompt; write one on each line (blank lines "
            "and lines that start with # are skipped)"
        )
    return prompts


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named.

    Raises:
        UsageError: it does not exist, cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
        if len(raw) > LIMIT_BYTES:
            raise UsageError(f"{what} {path} is larger than {LIMIT_BYTES >> 20} MiB")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None
