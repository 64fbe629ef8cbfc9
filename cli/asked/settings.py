"""What a user asked for: flags over a YAML file over the environment, as one value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from tpuport.cli.shown.errors import one_line
from tpuport.core.files.run_record import STAGES
from tpuport.core.spec.model_port import BLOCKS
from tpuport.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a command; ``None`` is what the user left to the defaults.

    Names and meanings are those of the flags. ``size`` is in ``height`` and ``width``,
    ``prompt_file`` is in ``prompts``.
    """

    model: str | None = None
    variant: str | None = None
    weights: str | None = None
    prompts: tuple[str, ...] = ()
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    fps: float | None = None
    steps: int | None = None
    guidance: float | None = None
    seeds: tuple[int, ...] = (0,)
    image: str | None = None
    video: str | None = None
    strength: float | None = None
    resolution: str | None = None
    aspect_ratio: str | None = None
    cache: str | None = None
    mesh: str | None = None
    dtype: str | None = None
    attention: str | None = None
    sharding: str | None = None
    blocks: str | None = None
    vae: str | None = None
    vae_tiling: str | None = None
    encode_on: str | None = None
    backend: str | None = None
    latents: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    out: str | None = None
    run_dir: Path | None = None
    cache_dir: Path | None = None
    no_compile_cache: bool = False
    executables: Path | None = None
    memory_report: bool = False
    profile: Path | None = None
    profile_calls: int | None = None
    no_jit: bool = False
    no_jit_stages: tuple[str, ...] = ()
    report: Path | None = None
    json: bool = False
    debug: bool = False

    def videos(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Prompt and seed of every video: each prompt with each seed."""
        pairs = [(prompt, seed) for prompt in self.prompts for seed in self.seeds]
        return tuple(p for p, _ in pairs), tuple(s for _, s in pairs)

    @property
    def implementations(self) -> dict[str, str]:
        """Component -> the implementation asked for."""
        return {} if self.vae is None else {"vae": self.vae}

    @property
    def op_by_op(self) -> tuple[str, ...]:
        """The stages that run op by op."""
        return STAGES if self.no_jit else self.no_jit_stages


#: Flags, and the keys of a file that say the same thing in other words.
_INSTEAD = (
    ({"prompts"}, {"prompts"}),
    ({"size"}, {"height", "width"}),
    ({"size", "height", "width"}, {"resolution", "aspect_ratio"}),
    ({"resolution", "aspect_ratio"}, {"height", "width"}),
    ({"image"}, {"video", "strength"}),
    ({"video"}, {"image"}),
)


def take_own_options(context: typer.Context, file: str | None) -> str | None:
    """Let a file also hold the options that only this command has.

    Called for ``--config`` before the command's other options are looked at: what it
    finds becomes their default, as if it were the flag's text.

    Raises:
        UsageError: the file cannot be read, or a key is none that the command knows.
    """
    if file:
        own_names = _own_options(context)
        used = [str(parameter.name) for parameter in context.command.params]
        found = _read_yaml(file, own_names, used)
        own = {name: value for name, value in found.items() if name not in _KINDS}
        context.default_map = {**(context.default_map or {}), **own}
    return file


def _own_options(context: typer.Context) -> list[str]:
    """The options of a command that are not among :data:`_KINDS`."""
    names = [str(parameter.name) for parameter in context.command.params]
    return [n for n in names if n not in _KINDS and n not in ("config", "help")]


def gather(context: typer.Context) -> Settings:
    """The settings of the command that ``context`` is of.

    Raises:
        UsageError: an unknown or doubled key in the YAML file, a value of a wrong kind,
            or two settings that exclude each other.
    """
    flags: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for name, value in context.params.items():
        if name != "config" and name not in _KINDS:
            continue  # what only this command has, it looks at itself
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "COMMANDLINE":
            flags[name] = value
        elif source == "ENVIRONMENT" and value:
            environment[name] = value
    config = flags.pop("config", None)
    given = _checked(flags, "")
    in_file: dict[str, Any] = {}
    if config:
        read = _read_yaml(config, _own_options(context))
        shared = {name: value for name, value in read.items() if name in _KINDS}
        in_file = _checked(shared, f"{config}: ")
    # A flag replaces what the file says about the same thing in other words.
    for flags_, replaced in _INSTEAD:
        if given.keys() & flags_:
            in_file = {k: v for k, v in in_file.items() if k not in replaced}
    given.pop("size", None)
    in_file.pop("size", None)
    return replace(Settings(), **{**_checked(environment, ""), **in_file, **given})


# --- kinds of values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("is not text")
    return value


def _path(value: Any) -> Path:
    text = _text(value)
    if not text:
        raise ValueError("is empty")
    return Path(text).expanduser()


def _media(value: Any) -> str:
    if not _text(value):
        raise ValueError("is empty; give a file")
    return str(value)


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_text(item) for item in values)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("is not an integer")
    return value


def _positive(value: Any) -> int:
    if _integer(value) < 1:
        raise ValueError("is not positive; give at least 1")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("is not a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("is neither true nor false")
    return value


def _seeds(value: Any) -> tuple[int, ...]:
    seeds: list[int] = []
    for item in value if isinstance(value, list) else [value]:
        parts = item.split(",") if isinstance(item, str) else [item]
        for part in parts:
            if isinstance(part, str):
                if not re.fullmatch(r"\s*-?[0-9]+\s*", part):
                    raise ValueError("is not an integer, or several as 1,2,3")
                part = int(part)
            seeds.append(_integer(part))
    if not seeds:
        raise ValueError("is empty")
    return tuple(seeds)


def _size(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([0-9]+)\s*[xX×]\s*([0-9]+)\s*", _text(value))
    if match is None:
        raise ValueError("is not WIDTHxHEIGHT, such as 720x480")
    width, height = int(match[1]), int(match[2])
    if not width or not height:
        raise ValueError("is empty; width and height are at least 1")
    return width, height


def _mesh(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    if isinstance(value, list):
        return ",".join(str(size) for size in value)
    return _text(value)


def _options(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    options: dict[str, Any] = {}
    for item in value if isinstance(value, list) else [value]:
        name, equals, text = _text(item).partition("=")
        if not equals or not name.strip():
            raise ValueError("is not NAME=VALUE")
        options[name.strip().replace("-", "_")] = text.strip()
    return options


def _choice(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return str(value)

    return parse


def _on_off(*choices: str) -> Callable[[Any], str]:
    """As :func:`_choice`; YAML reads a bare ``on`` as true."""
    named = _choice(*choices)

    def parse(value: Any) -> str:
        return named(("off", "on")[value] if isinstance(value, bool) else value)

    return parse


def _stages(value: Any) -> tuple[str, ...]:
    names = _texts(value)
    for name in names:
        if name not in STAGES:
            raise ValueError(f"is none of {', '.join(STAGES)}")
    return names


_KINDS: dict[str, Callable[[Any], Any]] = {
    "model": _text,
    "variant": _text,
    "weights": _text,
    "prompt": _texts,
    "prompt_file": _path,
    "negative_prompt": _text,
    "size": _size,
    "height": _positive,
    "width": _positive,
    "frames": _positive,
    "fps": _number,
    "steps": _positive,
    "guidance": _number,
    "seed": _seeds,
    "image": _media,
    "video": _media,
    "strength": _number,
    "resolution": _text,
    "aspect_ratio": _text,
    "cache": _text,
    "mesh": _mesh,
    "dtype": _text,
    "attention": _text,
    "sharding": _text,
    "blocks": _choice(*BLOCKS),
    "vae": _text,
    "vae_tiling": _on_off("auto", "on", "off"),
    "encode_on": _choice("device", "host"),
    "backend": _choice("tpuport", "diffusers"),
    "latents": _text,
    "option": _options,
    "out": _text,
    "run_dir": _path,
    "cache_dir": _path,
    "no_compile_cache": _flag,
    "executables": _path,
    "memory_report": _flag,
    "profile": _path,
    "profile_calls": _positive,
    "no_jit": _flag,
    "no_jit_stage": _stages,
    "report": _path,
    "json": _flag,
    "debug": _flag,
}
#: Other spellings of the same keys: diffusers' names, and plurals for lists.
_ALIASES = {
    "num_frames": "frames",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "prompts": "prompt",
    "seeds": "seed",
    "options": "option",
    "no_jit_stages": "no_jit_stage",
}
#: Settings that are called otherwise than their flag.
_FIELDS = {
    "prompt": "prompts",
    "seed": "seeds",
    "option": "options",
    "no_jit_stage": "no_jit_stages",
}


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values by field of :class:`Settings` (and ``size``), from one source."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        label = f"{where}{name}" if where else "--" + name.replace("_", "-")
        try:
            parsed = _KINDS[name](value)
        except (TypeError, ValueError) as error:
            shown = value[0] if isinstance(value, list) and len(value) == 1 else value
            raise UsageError(f"{label}: {shown!r} {error}") from None
        known[_FIELDS.get(name, name)] = parsed
    prefix = where or "--"
    if "size" in known:
        if both := sorted(known.keys() & {"height", "width"}):
            raise UsageError(
                f"{prefix}size and {prefix}{both[0]} exclude each other; give one"
            )
        known["width"], known["height"] = known["size"]
    if "image" in known and "video" in known:
        raise UsageError(
            f"{prefix}image and {prefix}video exclude each other; give one"
        )
    if "prompt_file" in known:
        if "prompts" in known:
            dash = "_" if where else "-"
            raise UsageError(
                f"{prefix}prompt and {prefix}prompt{dash}file exclude each other; give "
                "one"
            )
        known["prompts"] = _read_prompts(known.pop("prompt_file"))
    return known


# --- files


def _read_prompts(path: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in _read_text(path, "prompt file").splitlines()]
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise UsageError(
            f"prompt file {path} holds no prompt; write one on each line (blank lines "
            "and lines that start with # are skipped)"
        )
    return prompts


def _read_yaml(
    file: str, own: Sequence[str] = (), used: Sequence[str] = ()
) -> dict[str, Any]:
    """The keys of a YAML file, by the name of the flag; null is "not given".

    ``own`` are names beside :data:`_KINDS`; ``used`` are offered where one is unknown.
    """
    import yaml

    text = _read_text(Path(file).expanduser(), "config file")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f"config file {file} is not YAML: {one_line(error)}"
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"config file {file} holds {type(data).__name__}; write one `key: value` "
            "on each line"
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in _KINDS and name not in own:
            hint = _closest(key, [n for n in used if n not in ("config", "help")])
            raise UsageError(f"config file {file}: unknown key {key!r}{hint}")
        if value is None:
            continue
        if name in values:
            raise UsageError(f"config file {file}: {key!r} says {name} a second time")
        values[name] = value
    return values


def _closest(key: Any, used: Sequence[str]) -> str:
    known = [*used, *(other for other, name in _ALIASES.items() if name in used)]
    found = difflib.get_close_matches(str(key).replace("-", "_"), known, 1, 0.5)
    if found:
        return f"; did you mean {found[0]}?"
    return f"; known keys: {', '.join(used)}"


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None
