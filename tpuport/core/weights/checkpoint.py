"""Checkpoints in the diffusers on-disk layout: found, checked, streamed to devices.

A checkpoint is a folder with ``model_index.json`` and one folder per component, each
with a ``config.json`` and safetensors files, whole or sharded with an index. Pickle
files are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.files.sealed_json import canonical
from tpuport.core.weights.configs import check_config
from tpuport.core.weights.file_parts import opened
from tpuport.core.weights.hub import INDEXES, read_index, read_object
from tpuport.errors import WeightsError, damaged

#: Whose classes a checkpoint may name.
_LIBRARIES = ("diffusers", "transformers")

#: Suffixes of what is read of a tokenizer or a scheduler.
SMALL_FILES = (".json", ".model", ".txt", ".jinja")

#: File names of a component's weights, as diffusers and transformers spell them.
STEMS = ("diffusion_pytorch_model", "model")


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
        self.index_name, index = read_index(self.folder)
        if self.index_name != INDEXES[0]:
            # A third value tells where a component came from once.
            index = {name: _pair(entry) for name, entry in index.items()}
        self.index = index

    @property
    def reference(self) -> str:
        """The checkpoint's name from any folder: a hub id, ``demo``, or a path."""
        folder = Path(self.source).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.source

    def config(self, component: str) -> dict[str, Any]:
        """The config of a component, fit for the class that the index names.

        Raises:
            WeightsError: the file is missing or not JSON, a value cannot be, or the
                class does not exist.
        """
        names = ("config.json", "scheduler_config.json", "guider_config.json")
        files = [self.folder / component / name for name in names]
        found = [file for file in files if file.is_file()]
        if not found:
            raise damaged(
                f"{self.source}: {component}/config.json is missing; the folder is "
                "not a complete diffusers checkpoint",
                "the checkpoint",
            )
        config = read_object(found[0])
        name = self.class_name(component)
        # A class of a plugin's own library is the plugin's to check.
        if name and (library := self.index[component][0]) in _LIBRARIES:
            cls = getattr(importlib.import_module(library), name, None)
            if cls is None:
                raise damaged(
                    f"{self.source}: model_index.json: {component} is a {name} of "
                    f"{library}, which the installed version does not have"
                )
            stored = None
            with contextlib.suppress(WeightsError):  # for the stage that needs them
                stored = len(self.weight_files(component))
            file = f"{self.source}: {component}/{found[0].name}"
            check_config(cls, config, file, stored)
        return config

    def class_name(self, component: str) -> str | None:
        """The class that ``model_index.json`` names; ``None`` where it names none.

        Raises:
            WeightsError: the entry is no pair of a library and a class.
        """
        entry = self.index.get(component)
        if entry is None:
            return None
        pair = isinstance(entry, list) and len(entry) == 2
        if not pair or any(not isinstance(word, str | None) for word in entry):
            raise damaged(
                f"{self.source}: {self.index_name}: {component} is {entry!r}: a list "
                "of a library and a class is needed"
            )
        return entry[1] or None

    def weight_files(self, component: str) -> dict[str, Path]:
        """The file of every stored tensor of a component.

        Raises:
            WeightsError: no safetensors files, a missing shard, a truncated or
                unreadable file, only pickle files.
        """
        folder = self.folder / component
        if not folder.is_dir():
            raise damaged(
                f"{self.source}: folder {component}/ is missing; the checkpoint is "
                "incomplete",
                "the folder",
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
        raise damaged(
            f"{self.source}: {component}/ has no safetensors weights; the checkpoint "
            "is incomplete",
            "the folder",
        )

    def _sharded(self, component: str, index: Path) -> dict[str, Path]:
        mapping = _weight_map(index)
        stored: dict[str, Path] = {}
        for name in sorted(set(mapping.values())):
            shard = index.parent / name
            if not shard.is_file():
                raise damaged(
                    f"{self.source}: {component}/{name} is missing, though "
                    f"{index.name} names it; the checkpoint is incomplete"
                )
            for key in self._keys(shard):
                if mapping.get(key) != name:
                    raise damaged(
                        f"{self.source}: {component}/{name} holds {key}, which "
                        f"{index.name} does not place there",
                        "the folder",
                    )
                stored[key] = shard
        absent = sorted(set(mapping) - set(stored))
        if absent:
            raise damaged(
                f"{self.source}: {component}/{mapping[absent[0]]} lacks {absent[0]}, "
                f"which {index.name} places there",
                "the folder",
            )
        return stored

    def _keys(self, path: Path) -> list[str]:
        """The names of the tensors in a file; its header alone is read."""
        from safetensors import SafetensorError

        try:
            with opened(path, framework="pt", device="cpu") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise damaged(
                f"{self.source}: {path.parent.name}/{path.name} is truncated or not a "
                f"safetensors file ({error})"
            ) from error

    def fingerprint(self, component: str) -> str:
        """A fingerprint of the contents of a component's files, wherever they lie.

        The class that ``model_index.json`` names is part of it. Files that are not read
        (a README, another precision) do not count.
        """
        if component not in self._fingerprints:
            folder = self.folder / component
            content = fingerprint_files(folder, _files_read(folder))
            named = canonical([content, self.index.get(component)])
            self._fingerprints[component] = hashlib.sha256(named).hexdigest()
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
        index = folder / f"{stem}.safetensors.index.json"
        weights = [*folder.glob(f"{stem}.safetensors"), *folder.glob(index.name)]
        if index.is_file():
            # By the index: a shard may have any name.
            names = sorted(set(_weight_map(index).values()))
            shards = [folder / name for name in names]
            weights += [shard for shard in shards if shard not in weights]
        if weights:
            return [*weights, *folder.glob("config.json")]
    return [
        p
        for p in folder.iterdir()
        if p.suffix in SMALL_FILES and not p.name.startswith(".")
    ]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of its file."""
    mapping = read_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise damaged(f"{index} has no map")
    for tensor, name in mapping.items():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise damaged(
                f"{index}: weight_map.{tensor} is {name!r}, which is no file of its "
                "folder"
            )
    return mapping


def _pair(entry: Any) -> Any:
    """Library and class of a component; any other value of an index as it is."""
    told = isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)
    return entry[:2] if told else entry


def patterns(folders: Sequence[str], *suffixes: str) -> list[str]:
    """Of the hub's files, those that are read of ``folders``, and the indexes."""
    read = [f"{name}/*{suffix}" for name in folders for suffix in suffixes]
    return [*INDEXES, *read]
