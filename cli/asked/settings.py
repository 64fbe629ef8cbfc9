"""What a user asked for: flags over a YAML file over the environment, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from tpuport.core.files.atomic import one_line
from tpuport.core.files.run_record import RUN_FILE, CheckpointEvery
from tpuport.core.files.stores import AnyPath
from tpuport.core.files.typed import read_text
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import (
    COMMANDS,
    DEMO,
    EVERY,
    FILES,
    INSIDE,
    WHAT,
    WHERE,
    Asked,
    RunSettings,
    Setting,
    defaults_of,
    python_only,
    read_value,
    setting,
    settings_of,
)
from tpuport.errors import UsageError, did_you_mean, quoted

#: What is planned, compiled and measured where no prompt is given: its length counts.
PROMPT = "a panda plays a guitar in a bamboo forest, cinematic, slow motion"

AUTO = "auto"
"""The mesh that ``plan`` looks for."""


def _mesh_or_auto(value: Any) -> Any:
    return value if value == AUTO else kinds.mesh(value)


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings, Asked):
    """All settings of a command.

    Attributes:
        search: ``plan`` compares the legal meshes; ``mesh`` is ``None`` then.
        read_from: the files that other settings were read from.
        config: the YAML file and the keys that it gave; empty without one.
    """

    latents: str | None = setting(
        kinds.media,
        "--latents FILE",
        "Safetensors file with the initial noise.",
        commands="GE",
        panel=WHAT,
    )
    out: str | None = setting(
        kinds.text,
        "--out PATH",
        "A .mp4, .webm or .gif file, or a folder/ for PNGs.",
        commands="GDRSJ",
    )
    overwrite: bool = setting(
        kinds.flag,
        "--overwrite",
        "Replace a video; else fox.mp4 becomes fox-2.mp4.",
        default=False,
        commands="GDRSJ",
        panel=FILES,
    )
    run_dir: Path | None = setting(
        kinds.path,
        "--run-dir FOLDER",
        "Keep the stages here, and reuse finished ones.",
        commands="GEND",
        panel=FILES,
    )
    plan_mesh: None = setting(
        _mesh_or_auto,
        "--mesh MESH|auto",
        "Such as dp=2,tp=4; auto ranks the meshes that are possible.",
        becomes=lambda mesh: {"search": True} if mesh == AUTO else {"mesh": mesh},
        commands="P",
        panel=WHERE,
    )
    search: bool = python_only(kinds.flag, default=False)
    on_host: tuple[str, ...] = setting(
        kinds.texts,
        "--on-host COMPONENT",
        "Run a component by upstream's code, on the CPU.",
        default=(),
        commands="GENDPC",
        panel=WHERE,
    )
    checkpoint_every: CheckpointEvery = setting(
        kinds.checkpoint_every,
        "--checkpoint-every N|TIME",
        "How often to keep a run. (default: 60s)",
        default=CheckpointEvery(),
        commands="GNS",
        panel=FILES,
    )
    batch_size: int | None = setting(
        kinds.positive,
        "--batch-size N",
        "The most videos that one call makes together.",
        commands="GEPC",
        panel=WHAT,
    )
    preview: bool = setting(
        kinds.flag,
        "--preview",
        "Show frames while steps run.",
        default=False,
        commands="GNS",
        panel=INSIDE,
    )
    distributed: bool = setting(
        kinds.flag,
        "--distributed",
        "Run on all hosts: docs/many-hosts.md.",
        default=False,
        commands="GENDSBC",
        panel=WHERE,
    )
    coordinator: tuple[str, int] | None = setting(
        kinds.address,
        "--coordinator HOST:PORT",
        "The same by hand: where process 0 is,",
        commands="GENDSBC",
        panel=WHERE,
    )
    num_processes: int | None = setting(
        kinds.positive,
        "--num-processes N",
        "how many there are,",
        commands="GENDSBC",
        panel=WHERE,
    )
    process_id: int | None = setting(
        kinds.number_from_0,
        "--process-id I",
        "and which one this is, from 0.",
        commands="GENDSBC",
        panel=WHERE,
    )
    report: AnyPath | None = setting(
        kinds.any_path,
        "--report FILE",
        "Write the document of --json into this file too.",
        commands="GENDRPCSJ",
        panel=FILES,
    )
    json: bool = setting(
        kinds.flag,
        "--json",
        "Print one JSON document instead of text.",
        panel=EVERY,
        default=False,
        commands="".join(COMMANDS),
    )
    debug: bool = setting(
        kinds.flag,
        "--debug",
        "Show tracebacks and the libraries' log.",
        panel=EVERY,
        default=False,
        commands="".join(COMMANDS),
    )

    read_from: tuple[Path, ...] = field(default=(), compare=False)
    config: tuple[str, ...] = field(default=(), compare=False)

    def inputs(self) -> list[Path]:
        """The files and folders that the command reads, so that no output is one."""
        named = (self.image, self.video, self.latents, *(o.name for o in self.lora))
        files = [Path(f).expanduser() for f in named if f]
        if self.run_dir is not None:
            files.append(self.run_dir / RUN_FILE)
        weights = Path(self.weights or DEMO).expanduser()
        found = [weights] if str(weights) != DEMO and weights.is_dir() else []
        return [*files, *found, *self.read_from]


#: Every setting with a flag, by the name of its field.
TABLE = settings_of(Settings)
#: Spelling in YAML -> the key.
_SPELLINGS = {name: s.key for s in TABLE.values() for name in s.keys}
_KEYS = frozenset(_SPELLINGS.values())
#: Settings of a whole batch, which none of its lines may have.
_OF_THE_COMMAND = ("json", "debug", "report", "cache_dir", "overwrite")
#: Settings of one source that exclude each other.
_EITHER = (
    *(("size", "height"), ("size", "width"), ("image", "video")),
    *(("resolution", name) for name in ("size", "height", "width")),
    *(("aspect_ratio", name) for name in ("size", "height", "width")),
    ("prompt", "prompt_file"),
)


def take_own_options(context: typer.Context, file: str | None) -> str | None:
    """Let a file also hold the options that only this command has.

    Called for ``--config`` before the command's other options are looked at: what it
    finds becomes their default, as if it were the flag's text.
    """
    if file:
        own_names = _own_options(context)
        options = {str(one.name): one for one in context.command.params}
        own = {}
        for name, value in _read_yaml(file, own_names, [*options]).items():
            if name not in _KEYS:
                several = getattr(options[name], "multiple", False)
                one = several and not isinstance(value, list)
                own[name] = [value] if one else value
        context.default_map = {**(context.default_map or {}), **own}
    return file


def _own_options(context: typer.Context) -> list[str]:
    names = [str(parameter.name) for parameter in context.command.params]
    return [n for n in names if n not in _KEYS and n not in ("config", "help")]


def gather(context: typer.Context, command: str) -> Settings:
    """The settings of the command that ``context`` is of.

    Args:
        command: its letter in the table.
    """
    flags: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for name, value in context.params.items():
        if name != "config" and name not in _KEYS:
            continue  # what only this command has, it looks at itself
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "COMMANDLINE":
            flags[name] = value
        elif source == "ENVIRONMENT" and value:
            environment[name] = value
    config = flags.pop("config", None)
    given = _checked(flags, "", command)
    read = _read_yaml(config, _own_options(context)) if config else {}
    shared = {name: value for name, value in read.items() if name in _KEYS}
    in_file = _checked(shared, f"{config}: ", command)
    replaced = _replaced(given)
    in_file = {name: v for name, v in in_file.items() if name not in replaced}
    named = (config, flags.get("prompt_file"), read.get("prompt_file"))
    return Settings(
        **{**_checked(environment, "", command), **in_file, **given},
        read_from=tuple(Path(file).expanduser() for file in named if file),
        config=(config, *read) if config else (),
    )


def _replaced(given: Mapping[str, Any]) -> set[str]:
    """The fields that say the same as given ones in other words: a flag wins."""
    found = {
        other
        for field, other in (("image", "video"), ("video", "image"))
        if field in given
    }
    if "image" in given:
        found.add("strength")
    by_size = ("height", "width"), ("resolution", "aspect_ratio")
    for names, others in (by_size, by_size[::-1]):
        if given.keys() & set(names):
            found.update(others)
    return found


#: What joins processes to one run.
_OF_PROCESSES = ("distributed", "coordinator", "num_processes", "process_id")


def in_batch(setting: Setting) -> bool:
    """Whether ``batch`` has a setting of ``generate``: not what looks into one run."""
    alone = setting.panel == INSIDE or setting.key in ("run_dir", *_OF_PROCESSES)
    return "G" in setting.commands and not alone


#: What a request to a server says itself, or what goes with one file.
_OF_A_REQUEST = (
    *("prompt", "prompt_file", "image", "video", "strength", "latents", "seed"),
    *("out", "overwrite", "report"),
)


def in_server(setting: Setting) -> bool:
    """Whether ``serve`` has a setting of ``generate``."""
    return in_batch(setting) and setting.key not in _OF_A_REQUEST


def of_server(settings: Settings) -> Settings:
    """The settings of a server, found to say nothing that a request says."""
    defaults = defaults_of(Settings)
    for name in _OF_A_REQUEST:
        if name in defaults and getattr(settings, name) != defaults[name]:
            raise UsageError(f"{name} is not for serve; a request says it")
    return settings


def of_line(values: Mapping[str, Any], where: str, below: Settings) -> Settings:
    """The settings of one request of a batch.

    Args:
        values: what its line says; a key is a flag of ``generate``.
        where: the line is, for messages.
        below: what the flags of the command say; the line wins.

    Raises:
        UsageError: a key or a value is wrong, or is not for one request.
    """
    used = [s.key for s in TABLE.values() if in_batch(s)]
    named = _named(values, where, used=used)
    for key in named:
        if key in _OF_THE_COMMAND:
            raise UsageError(f"{where}: {key} is for all lines; give the flag")
        if key not in used:
            raise UsageError(f"{where}: {key} is not for a batch; use generate")
    given = _checked(named, f"{where}: ", "G")
    defaults = defaults_of(Settings)
    other = {name: defaults[name] for name in _replaced(given)}
    return replace(below, **{**other, **given})


def _checked(values: Mapping[str, Any], where: str, command: str) -> dict[str, Any]:
    """The fields of :class:`Settings` that one source gives, typed."""

    def label(key: str) -> str:
        return where + key if where else "--" + key.replace("_", "-")

    known: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        name = _field(key, command)
        typed = read_value(TABLE[name].kind, value, label(key))
        (known if TABLE[name].becomes is None else others)[name] = typed
    for one, other in _EITHER:
        if one in values and other in values:
            raise UsageError(
                f"{label(one)} and {label(other)} exclude each other; give one"
            )
    for name, typed in others.items():
        for target, said in (TABLE[name].becomes or dict)(typed).items():
            # All stages and some of them: there is nothing else to say twice.
            before = known.get(target, ()) if isinstance(said, tuple) else ()
            known[target] = (*before, *said) if isinstance(said, tuple) else said
    return known


def _field(key: str, command: str) -> str:
    """The field that a key stands for; a command may have its own for a key."""
    names = [name for name, setting in TABLE.items() if setting.key == key]
    own = [name for name in names if command in TABLE[name].commands]
    return (own or names)[0]


def _read_yaml(
    file: str, own: Sequence[str] = (), used: Sequence[str] = ()
) -> dict[str, Any]:
    """The keys of a YAML file, by the name of the flag; null is "not given".

    ``own`` are names beside the table's; ``used`` are offered where one is unknown.
    """
    return _named(_load_mapping(file), f"--config {file}", own, used)


def _named(
    given: Mapping[Any, Any],
    where: str,
    own: Sequence[str] = (),
    used: Sequence[str] = (),
) -> dict[str, Any]:
    """What is given, by the name of the flag; see :func:`_read_yaml`."""
    values: dict[str, Any] = {}
    spelt: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in own:
            name = _SPELLINGS.get(name, name)
        if name not in _KEYS and name not in own:
            hint = _closest(key, [n for n in used if n not in ("config", "help")])
            raise UsageError(f"{where}: unknown key {quoted(key)}{hint}")
        if value is None:
            continue
        if name in values:
            raise UsageError(
                f"{where}: {spelt[name]} and {key} are the same setting; keep one"
            )
        values[name], spelt[name] = value, key
    return values


def _closest(key: Any, used: Sequence[str]) -> str:
    known = [*used, *(other for other, name in _SPELLINGS.items() if name in used)]
    name = str(key).replace("-", "_")
    return "; " + did_you_mean(name, known, "the keys are the flags in --help")


def _load_mapping(file: str) -> dict[Any, Any]:
    """The keys and values of a YAML file; empty for an empty file."""
    import yaml

    class Strict(yaml.SafeLoader):
        """Plain YAML without aliases, and with each key once."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise UsageError(
                    f"--config {file}: line {event.start_mark.line + 1} has the "
                    f"alias *{event.anchor}; write the value out"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            first: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if line != first.setdefault(str(key.value), line):
                    raise UsageError(
                        f"--config {file}: lines {first[str(key.value)]} and {line} "
                        f"both have the key {key.value!r}; keep one of them"
                    )
            return super().construct_mapping(node, deep)

    path = read_value(kinds.path, file, "--config")
    text = read_text(path, "--config")
    try:
        data = yaml.load(text, Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--config {file} is not YAML: {one_line(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"--config {file} holds {type(data).__name__}; write one `key: value` "
            "on each line"
        )
    return data
