"""Attention in numpy float64, written apart from the code under test.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and options of one test call; ``mask`` names one of ``make_mask``."""

    q_len: int
    kv_len: int
    head_dim: int = 64
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    v_dim: int | None = None
    is_causal: bool = False
    mask: str | None = None
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    dtype: str = "float32"

    def __str__(self) -> str:
        changed = [f"{self.q_len}x{self.kv_len}x{self.head_dim}"]
        if self.heads != self.kv_heads:
            changed.append(f"gqa{self.heads}:{self.kv_heads}")
        for name in ("is_causal", "mask", "lengths", "scale", "v_dim"):
            value = getattr(self, name)
            if value not in (None, False):
                changed.append(f"{name}={value}")
        if self.dtype != "float32":
            changed.append(self.dtype)
        return " ".join(changed)


def inputs(case: Case, size: float = 1.0) -> tuple[list[np.ndarray], dict[str, Any]]:
    """[q, k, v] and the keyword arguments of the case; ``size`` scales q and k.

    In numpy, so that what a test does to them compiles nothing.
    """
    rng = np.random.default_rng(7)
    kv = (case.batch, case.kv_heads, case.kv_len)
    q = rng.standard_normal((case.batch, case.heads, case.q_len, case.head_dim))
    k = rng.standard_normal((*kv, case.head_dim))
    v = rng.standard_normal((*kv, case.v_dim or case.head_dim))
    arrays = [x.astype(jnp.dtype(case.dtype)) for x in (q * size, k * size, v)]
    options: dict[str, Any] = {"is_causal": case.is_causal, "scale": case.scale}
    if case.mask is not None:
        options["mask"] = make_mask(case)
    if case.lengths is not None:
        options["kv_lengths"] = np.asarray(case.lengths, np.int32)
    return arrays, options


def make_mask(case: Case) -> np.ndarray:
    """A mask by name: "bool" or "float", then the dims that are not broadcast.

    "float bhqk", "bool k", "bool q" and so on. "dead" after it empties row 0: False,
    or -inf.
    """
    assert case.mask is not None
    kind, dims, *dead = case.mask.split()
    full = {
        "b": case.batch,
        "h": case.heads,
        "q": case.q_len,
        "k": case.kv_len,
    }
    shape = tuple(size if letter in dims else 1 for letter, size in full.items())
    rng = np.random.default_rng(11)
    if kind == "bool":
        mask: np.ndarray = rng.random(shape) < 0.7
    else:
        mask = rng.standard_normal(shape).astype(np.float32) * 2
        mask[rng.random(shape) < 0.1] = -np.inf
    if dead:
        mask[:, :, 0] = False if kind == "bool" else -np.inf
    return mask


@functools.cache
def _program(attention: Callable[..., Any], fixed: tuple[tuple[str, Any], ...]) -> Any:
    # What a program rounds is rounded: the compiler would leave roundings out.
    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def run(arrays: Any, given: dict[str, Any]) -> Any:
        return attention(*arrays, **given, **dict(fixed))

    return run


def compiled(attention: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """The result of a call, by a program that calls of one shape share.

    Masks and lengths are inputs of the program. All other options are part of it, but
    for None and False, which are what a call takes without them.
    """
    given = {
        name: options.pop(name)
        for name in ("mask", "kv_lengths")
        if options.get(name) is not None
    }
    fixed = {n: v for n, v in options.items() if v is not None and v is not False}
    return _program(attention, tuple(sorted(fixed.items())))(arrays, given)


def numpy_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    kv_lengths: Any = None,
) -> np.ndarray:
    """The contract of ``reference_attention`` in float64, with everything repeated."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.swapaxes(-1, -2) * factor
    allowed = np.ones(scores.shape, bool)
    if is_causal:
        allowed &= np.tril(np.ones(scores.shape[-2:], bool))
    if kv_lengths is not None:
        index = np.arange(k.shape[2])
        allowed &= (index < np.asarray(kv_lengths)[:, None])[:, None, None]
    if mask is not None and np.asarray(mask).dtype == bool:
        allowed &= np.asarray(mask)
    elif mask is not None:
        scores = scores + np.asarray(mask, np.float64)
    scores = np.where(allowed, scores, -np.inf)
    highest = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    return np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) @ v


def worst(got: jax.Array, want: Any) -> float:
    """The largest absolute difference; NaN counts as infinite."""
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    return float(np.where(np.isnan(error), np.inf, error).max(initial=0.0))
