"""Executables of the programs that a port makes of upstream's modules.

The key of such a program has a hash of what was traced. So every process traces, and
what is loaded is what would have been compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from tpuport.core.enums import StageName
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.compiler_flags import GATHERS
from tpuport.core.programs import executable_files as files
from tpuport.core.programs.built_folder import BuiltFolder
from tpuport.core.programs.jax_cache import XLA_FOLDER, lowering, persistent_cache
from tpuport.core.programs.program_key import (
    ProgramKey,
    array_text,
    config_of,
    device_fields,
)
from tpuport.core.reports import Reporter
from tpuport.errors import ArtifactError

#: The program of a whole component.
WHOLE = "forward"
#: In place of a component: upstream's arithmetic between the calls of modules.
ARITHMETIC = "arithmetic"
#: Whose flags of the compiler a program may have.
_STAGES = (
    (StageName.DENOISE,),
    (StageName.DENOISE, GATHERS),
    (StageName.DECODE,),
    (StageName.DECODE, GATHERS),
)
#: Of a config, what tells of loading and not of the model.
_LOADING = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


def lowered(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """What is compiled, with no path of a source file in it."""
    with lowering():
        return traced.lower()


def module_key(
    name: str,
    module: torch.nn.Module | None,
    mesh: jax.sharding.Mesh,
    weights: Mapping[str, Any],
    program: jax.stages.Lowered,
    stages: Sequence[str],
) -> ProgramKey:
    """The key of one program of a module.

    Args:
        name: the component, and the path within.
        module: ``None`` for :data:`ARITHMETIC`.
        weights: as the program takes them, or ``ShapeDtypeStruct``.
        program: from :func:`lowered`.
        stages: what it was compiled for, as the table of the compiler's flags says.
    """
    component, _, path = name.partition(".")
    given = jax.tree.leaves(program.in_avals)[len(weights) :]
    return ProgramKey(
        model=ARITHMETIC if module is None else type(module).__name__,
        component=component,
        program=path or WHOLE,
        config={} if module is None else _without(config_of(module)),
        weights={key: array_text(value) for key, value in sorted(weights.items())},
        arguments={f"[{i}]": str(one) for i, one in enumerate(given)},
        structure=hashlib.sha256(program.as_text().encode()).hexdigest(),
        **device_fields(mesh, *stages),
    )


@dataclass(frozen=True, kw_only=True)
class ModulePrograms:
    """A folder of executables, for one pipeline on one mesh.

    Attributes:
        built: the folder.
        reporter: told of programs that are not in it.
    """

    built: BuiltFolder
    reporter: Reporter

    def check(self, mesh: jax.sharding.Mesh, **about: Any) -> None:
        """Refuse a folder for another pipeline or other devices.

        Args:
            about: entries of the manifest as they must be.

        Raises:
            ArtifactError: what differs.
        """
        made = dict(self.built.manifest)
        for name, wanted in about.items():
            if made.get(name) != wanted:
                words = f"{name} {made.get(name, 'none')} -> {wanted}"
                raise self.built.refusal("it", [words])
        here = [device_fields(mesh, *stages) for stages in _STAGES]
        for entry in self.built.entries:
            key = entry.key
            found = min((replace(key, **now).difference(key) for now in here), key=len)
            if found:
                raise self.built.refusal(key.name, found)

    def check_modules(self, components: Mapping[str, Any]) -> None:
        """Refuse a folder for modules of another config.

        Args:
            components: of the pipeline; their weights do not count.

        Raises:
            ArtifactError: what differs.
        """
        for key in (entry.key for entry in self.built.entries):
            if key.component == ARITHMETIC:
                continue
            path = "" if key.program == WHOLE else key.program
            module = components[key.component].get_submodule(path)
            now = replace(key, config=_without(config_of(module)))
            if found := now.difference(key):
                raise self.built.refusal(key.name, found)

    def find(self, key: ProgramKey) -> files.Entry | None:
        """The executable of a key; ``None`` if no program is for these arguments.

        Raises:
            ArtifactError: the module was compiled with other weights or another config.
        """
        alike = [e for e in self.built.entries if e.key.name == key.name]
        for entry in alike:
            if entry.key.digest == key.digest:
                return entry
        differing = [
            replace(
                key, arguments=e.key.arguments, structure=e.key.structure
            ).difference(e.key)
            for e in alike
        ]
        if differing and all(differing):
            raise self.built.refusal(key.name, min(differing, key=len))
        return None

    def ready(
        self, key: ProgramKey, program: jax.stages.Lowered, mesh: jax.sharding.Mesh
    ) -> tuple[Callable[..., Any], files.Entry | None]:
        """What runs a program, and the executable if it is one of the folder's.

        Raises:
            ArtifactError: as :meth:`find`, or the file is damaged.
        """
        entry = self.find(key)
        folder = self.built.folder
        if entry is None:
            self.reporter.say(f"{folder}: {key.name} was not there: compiled")
            return program.compile(), None
        try:
            arguments, _ = program.in_avals
            return files.load(entry, arguments, list(mesh.devices.flat)), entry
        except ArtifactError:
            raise
        except Exception as error:  # what jax raises if the backend refuses it
            self.reporter.say(
                f"{entry.path}: jax cannot load it ({type(error).__name__}: "
                f"{one_line(error)}); going on with jax's own cache"
            )
        with persistent_cache(folder / XLA_FOLDER):
            return program.compile(), None


def _without(config: Any) -> Any:
    if isinstance(config, dict):
        return {k: _without(v) for k, v in config.items() if k not in _LOADING}
    return config
