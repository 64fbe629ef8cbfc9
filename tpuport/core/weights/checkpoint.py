"""Checkpoints in the diffusers on-disk layout: found, checked, streamed to devices.

A checkpoint is a folder with ``model_index.json`` and one folder per component, each
with a ``config.json`` and safetensors files, whole or sharded with an index. Pickle
files are never read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.errors import HubError, MissingWeightsError, WeightsError

if TYPE_CHECKING:
    import torch

#: File names of a component's weights, as diffusers and transformers spell them.
STEMS = ("diffusion_pytorch_model", "model")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass
class Checkpoint:
    """A local folder in the diffusers layout.

    Attributes:
        folder: the folder on disk.
        source: what the user named: a hub id, a folder, or ``demo``.
    """

    folder: Path
    source: str
    _fingerprints: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Upstream's loaders could take a relative path of two parts for a hub id.
        self.folder = self.folder.absolute()
        self.index = _read_json(self.folder / "model_index.json")

    @property
    def reference(self) -> str:
        """The checkpoint's name from any folder: a hub id, ``demo``, or a path."""
        folder = Path(self.source).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.source

    def config(self, component: str) -> dict[str, Any]:
        """The config of a component.

        Raises:
            WeightsError: the file is missing or not JSON.
        """
        folder = self.folder / component
        for name in ("config.json", "scheduler_config.json", "guider_config.json"):
            if (folder / name).is_file():
                return _read_json(folder / name)
        raise WeightsError(
            f"{self.source}: {component}/config.json is missing; the folder is not a "
            "complete diffusers checkpoint"
        )

    def require(self, name: str, *instead: str) -> None:
        """Refuse a checkpoint without a file.

        Args:
            name: such as ``"tokenizer/spiece.model"``.
            instead: files that do as well.

        Raises:
            WeightsError: none of them is there.
        """
        if not any((self.folder / path).is_file() for path in (name, *instead)):
            others = f" (and {', '.join(instead)})" if instead else ""
            raise WeightsError(
                f"{self.source}: {name} is missing{others}; the checkpoint is "
                "incomplete"
            )

    def check_class(self, component: str, class_path: str) -> None:
        """Refuse a component of another class than the port is for.

        Raises:
            WeightsError: ``model_index.json`` names another class, or none.
        """
        entry = self.index.get(component)
        if not entry or not entry[1]:
            raise WeightsError(
                f"{self.source}: model_index.json has no {component!r}; the folder is "
                "not a complete diffusers checkpoint"
            )
        expected = class_path.partition(":")[2]
        if entry[1] != expected:
            raise WeightsError(
                f"{self.source}: {component} is a {entry[1]}, expected {expected}"
            )

    def weight_files(self, component: str) -> dict[str, Path]:
        """The file of every stored tensor of a component.

        Raises:
            WeightsError: no safetensors files, a missing shard, a truncated or
                unreadable file, only pickle files.
        """
        folder = self.folder / component
        if not folder.is_dir():
            raise WeightsError(
                f"{self.source}: folder {component}/ is missing; the checkpoint is "
                "incomplete"
            )
        for stem in STEMS:
            index = folder / f"{stem}.safetensors.index.json"
            whole = folder / f"{stem}.safetensors"
            if index.is_file():
                return self._sharded(component, index)
            if whole.is_file():
                return dict.fromkeys(self._keys(whole), whole)
        pickles = [
            p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt")
        ]
        if pickles:
            raise WeightsError(
                f"{self.source}: {component}/ has only pickle weights ({pickles[0]}); "
                "pickle files can run code and are not read. Convert them with "
                "save_pretrained(..., safe_serialization=True)"
            )
        raise WeightsError(
            f"{self.source}: {component}/ has no safetensors weights; the checkpoint "
            "is incomplete"
        )

    def _sharded(self, component: str, index: Path) -> dict[str, Path]:
        mapping = _read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise WeightsError(f"{self.source}: {component}/{index.name} has no map")
        stored: dict[str, Path] = {}
        for name in sorted(set(mapping.values())):
            shard = index.parent / name
            if not shard.is_file():
                raise WeightsError(
                    f"{self.source}: {component}/{name} is missing, though "
                    f"{index.name} names it; the checkpoint is incomplete"
                )
            for key in self._keys(shard):
                if mapping.get(key) != name:
                    raise WeightsError(
                        f"{self.source}: {component}/{name} holds {key}, which "
                        f"{index.name} does not place there"
                    )
                stored[key] = shard
        absent = sorted(set(mapping) - set(stored))
        if absent:
            raise WeightsError(
                f"{self.source}: {component}/{mapping[absent[0]]} lacks {absent[0]}, "
                f"which {index.name} places there"
            )
        return stored

    def _keys(self, path: Path) -> list[str]:
        with self._open(path) as file:
            return list(file.keys())

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{self.source}: {path.parent.name}/{path.name} is truncated or not a "
                f"safetensors file ({error}); download it again"
            ) from error

    def shapes(self, files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of ``files``; reads headers only."""
        found: dict[str, tuple[int, ...]] = {}
        for path in dict.fromkeys(files.values()):
            with self._open(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    found[name] = tuple(file.get_slice(name).get_shape())
        return found

    def stream(
        self, files: Mapping[str, Path], names: Sequence[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors one at a time, file by file, on the host."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(files[name], []).append(name)
        for path, wanted in by_file.items():
            with self._open(path) as file:
                for name in wanted:
                    yield name, file.get_tensor(name)

    def finite(self, component: str) -> bool:
        """Whether no weight of a component is NaN or infinite; reads all of them."""
        files = self.weight_files(component)
        return all(bool(t.isfinite().all()) for _, t in self.stream(files, list(files)))

    def fingerprint(self, component: str) -> str:
        """A fingerprint of the contents of a component's files, wherever they lie.

        Files that are not read (a README, another precision) do not count.
        """
        if component not in self._fingerprints:
            folder = self.folder / component
            self._fingerprints[component] = fingerprint_files(
                folder, _files_read(folder)
            )
        return self._fingerprints[component]

    def fingerprints(self, components: Iterable[str]) -> dict[str, str]:
        """:meth:`fingerprint` of each component that is there."""
        return {name: self.fingerprint(name) for name in components if self.has(name)}

    def has(self, component: str) -> bool:
        """Whether the component's folder exists."""
        return (self.folder / component).is_dir()


def _files_read(folder: Path) -> list[Path]:
    """The files of a component's folder that are read: config and weights, or all
    the small files of a tokenizer or scheduler."""
    for stem in STEMS:
        weights = [
            *folder.glob(f"{stem}.safetensors"),
            *folder.glob(f"{stem}.safetensors.index.json"),
            *folder.glob(f"{stem}-[0-9]*-of-[0-9]*.safetensors"),
        ]
        if weights:
            return [*weights, *folder.glob("config.json")]
    small = (".json", ".model", ".txt", ".jinja")
    return [
        p for p in folder.iterdir() if p.suffix in small and not p.name.startswith(".")
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing; the folder is not a diffusers checkpoint (one has "
            "model_index.json and a folder per component)"
        ) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return data


def local_folder(weights: str | Path) -> Path | None:
    """The folder that ``weights`` names; ``None`` for a hub id.

    Raises:
        MissingWeightsError: there is no such folder, and it cannot be a hub id.
    """
    text = str(weights)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise MissingWeightsError(
            f"weights {text!r} is a file; a folder in the diffusers layout is needed"
        )
    if isinstance(weights, str) and _HUB_ID.fullmatch(text):
        return None
    raise MissingWeightsError(
        f"weights folder {text!r} does not exist, and it is not a hub id "
        "(owner/name) either"
    )


def resolve(
    weights: str | Path,
    *,
    folders: Sequence[str],
    pipelines: Sequence[str],
    model: str,
    say: Callable[[str], None] = lambda text: None,
    reader: Callable[[str], str | None] = lambda pipeline: None,
) -> Checkpoint:
    """The checkpoint that ``weights`` names: a local folder or a hub id.

    Args:
        weights: a folder in the diffusers layout, or ``owner/name`` on the hub.
        folders: the component folders that are needed; only these are downloaded.
        pipelines: the pipeline classes that the model port reads.
        model: name of the model, for messages.
        say: called with a line before a download.
        reader: the model port that reads a pipeline class, if any, for messages.

    Raises:
        MissingWeightsError: no such folder.
        WeightsError: a checkpoint of another model.
        HubError: the hub cannot be reached or has no such checkpoint.
    """
    text = str(weights)
    folder = local_folder(weights)
    if folder is not None:
        checkpoint = Checkpoint(folder, text)
    else:
        say(f"looking for {text} on the hub")
        checkpoint = Checkpoint(_download(text, folders), text)
    found = checkpoint.index.get("_class_name")
    if found not in pipelines:
        raise WeightsError(
            f"{text}: model_index.json is of a {found}; model {model!r} reads "
            + ", ".join(pipelines)
            + (f". Use --model {other}" if (other := reader(str(found))) else "")
        )
    return checkpoint


def _download(repo_id: str, folders: Sequence[str]) -> Path:
    """Fetch the named folders of a hub checkpoint; returns the snapshot folder."""
    from huggingface_hub import snapshot_download

    patterns = ["model_index.json"]
    for name in folders:
        patterns += [f"{name}/*.json", f"{name}/*.safetensors", f"{name}/*.model"]
        patterns += [f"{name}/*.txt", f"{name}/*.jinja"]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as error:
        # All errors of the hub client (network, authorisation, no such id) end here:
        # the user needs one line, and --debug keeps the chain.
        reason = str(error).strip().splitlines()[0] if str(error) else ""
        raise HubError(
            f"hub id {repo_id!r} could not be fetched "
            f"({type(error).__name__}: {reason[:160]}). Check the name and the "
            "network, or download it elsewhere and pass the folder to --weights"
        ) from error
