"""Shapes that tracing found, kept beside the executables of the programs they make."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.programs.executable_files import ExecutableStore, Traced, read_payload
from tpuport.core.programs.program_key import ProgramKey
from tpuport.errors import ArtifactError


class KeptShapes(dict[Any, Any]):
    """What :func:`tpuport.core.run.step_caching.with_step_cache` keeps its shapes in.

    Args:
        known: what this process has found already.
        store: where files are; ``None`` for none.
        key_of: the program key for a key of this dictionary.
        say: told about a damaged file.
    """

    def __init__(
        self,
        known: Mapping[Any, Any],
        store: ExecutableStore | None,
        key_of: Callable[[Any], ProgramKey],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(known)
        self._store = store
        self._key_of = key_of
        self._say = say

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and self._store is not None:
            try:
                entry = self._store.find(self._key_of(key))
                if entry is not None:
                    super().__setitem__(key, _structs(read_payload(entry)))
            except ArtifactError as error:
                self._say(f"{error}; traced again")
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self._store is not None:
            try:
                self._store.keep(self._key_of(key), _payload(value), Traced())
            except ArtifactError as error:
                self._say(f"shapes are not kept for the next process: {error}")


def _payload(structs: Any) -> bytes:

    leaves, tree = jax.tree.flatten(structs)
    stream = io.BytesIO()
    pickle.dump((tree, [(tuple(x.shape), str(x.dtype)) for x in leaves]), stream)
    return stream.getvalue()


def _structs(payload: bytes) -> Any:

    tree, leaves = pickle.loads(payload)
    return jax.tree.unflatten(
        tree,
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in leaves],
    )
