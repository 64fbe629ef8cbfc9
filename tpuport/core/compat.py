"""The one place that knows about breaks between torch, torchax and jax releases.

torchax 0.0.13 names about twenty ``Dimname`` overloads of ATen operators while it is
imported. torch 2.13 removed named tensors and those overloads with them, so the import
fails with ``AttributeError``. Declaring an overload of the same name is enough: torchax
only uses the names as dictionary keys, nothing ever calls them.

Upstream: torchax/amp.py and torchax/decompositions.py at 0.0.13. The workaround can go
when torchax is released without those names; ``tests/core/test_compat.py`` fails on the
day it is no longer needed.
"""

from __future__ import annotations

import threading
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tpuport.errors import TpuportError

if TYPE_CHECKING:
    from types import ModuleType

#: The overloads torchax 0.0.13 names and torch 2.13 no longer has, as (op, overload).
DIMNAME_OVERLOADS: tuple[tuple[str, str], ...] = (
    ("all", "dimname"),
    ("all", "dimname_out"),
    ("index_add", "dimname"),
    ("index_copy", "dimname"),
    ("index_copy_", "dimname"),
    ("index_fill", "Dimname_Scalar"),
    ("index_fill", "Dimname_Tensor"),
    ("index_fill_", "Dimname_Scalar"),
    ("index_fill_", "Dimname_Tensor"),
    ("norm", "names_ScalarOpt_dim"),
    ("norm", "names_ScalarOpt_dim_dtype"),
    ("norm", "names_dtype_out"),
    ("norm", "names_out"),
    ("prod", "dim_Dimname"),
    ("std", "correction_names"),
    ("std", "correction_names_out"),
    ("std", "names_dim"),
    ("std", "names_out"),
    ("std_mean", "correction_names"),
    ("std_mean", "names_dim"),
    ("unbind", "Dimname"),
)

# The library object must outlive the overloads it declares.
_libraries: list[Any] = []
_lock = threading.Lock()


def missing_overloads() -> tuple[tuple[str, str], ...]:
    """The entries of :data:`DIMNAME_OVERLOADS` that the installed torch lacks."""
    import torch

    missing = []
    for op, overload in DIMNAME_OVERLOADS:
        packet = getattr(torch.ops.aten, op)
        if overload not in packet.overloads():
            missing.append((op, overload))
    return tuple(missing)


def declare_missing_overloads() -> tuple[tuple[str, str], ...]:
    """Declare what is missing, and nothing else; returns what was declared.

    The declared schema takes a required string that no caller passes, so overload
    resolution of ``torch.ops.aten.<op>(...)`` can never choose it.
    """
    import torch

    with _lock:
        missing = missing_overloads()
        if missing:
            library = torch.library.Library("aten", "FRAGMENT")
            for op, overload in missing:
                library.define(
                    f"{op}.{overload}(Tensor self, *, str tpuport_unused) -> Tensor"
                )
            _libraries.append(library)
        return missing


@cache
def import_torchax() -> ModuleType:
    """``torchax``, imported so that it works on torch 2.13 and leaves torch as it was.

    torchax switches the fused transformer fast path of torch off for the whole process
    when it is imported; that is put back, because tpuport promises that torch behaves
    as before outside a session.

    Raises:
        TpuportError: torchax cannot be imported with this torch.
    """
    import torch

    declare_missing_overloads()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        import torchax
        import torchax.tensor
    except Exception as error:
        raise TpuportError(
            f"torchax does not import with torch {torch.__version__}: {error}. "
            "tpuport is tested with torchax 0.0.13 on torch 2.13; "
            "`tpuport doctor` prints the installed pair."
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return torchax


def shard_map(run: Any, **kwargs: Any) -> Any:
    """``jax.shard_map`` without the varying-axes check.

    jax 0.10 names the argument ``check_vma``. The check is off because Pallas calls and
    ``lax.scan`` carries do not annotate which mesh axes they vary over.

    Within ``jax.ensure_compile_time_eval`` a device's place on an axis would be asked
    for at once, and has no value yet: what ``run`` does is traced there as elsewhere.
    """
    import functools

    import jax

    @functools.wraps(run)
    def traced(*arrays: Any) -> Any:
        with without_folding():
            return run(*arrays)

    return jax.shard_map(traced, check_vma=False, **kwargs)


def without_folding() -> Any:
    """A context in which constants stay operations of the program that is traced."""
    from jax._src.config import eager_constant_folding

    return eager_constant_folding(False)


def compiler_flags() -> tuple[str, ...]:
    """The flags of XLA and libtpu in force for this process, sorted.

    They are those that jax takes into the key of its own cache
    (``jax/_src/cache_key.py`` at 0.10.2): from ``XLA_FLAGS``, ``LIBTPU_INIT_ARGS`` and
    the command line, without the ones that only say what is dumped.

    Raises:
        TpuportError: this jax keeps them elsewhere.
    """
    try:
        from jax._src import cache_key

        found: list[bytes] = []  # collected in place of a hash
        hasher = SimpleNamespace(update=found.append)
        cache_key._hash_xla_flags(hasher, cache_key.get_flag_prefixes())
    except (ImportError, AttributeError, TypeError) as error:
        import jax

        raise TpuportError(
            f"jax {jax.__version__} does not tell its compiler flags as jax 0.10 does "
            f"({error}); run with --no-compile-cache"
        ) from error
    return tuple(text.decode() for text in found)
