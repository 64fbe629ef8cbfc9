"""One door to attention: picks an implementation, or says why none will do.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from tpuport.errors import AttentionError, UsageError
from tpuport.kernels.blockwise import blockwise_attention
from tpuport.kernels.problem import Problem, describe
from tpuport.kernels.reference import reference_attention
from tpuport.kernels.splash import splash_attention, splash_refusal

AUTO = "auto"
# Scores per head up to which "auto" takes the formula as it is. Measured on two CPU
# cores, 48 heads, float32: at 226 x 226 both are alike, from 700 x 700 to 2000 x 2000
# the formula takes 1.2 to 2.2 times as long as blockwise (2.7 when causal).
SMALL_SCORES = 512 * 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """A way to compute attention and what it refuses.

    ``refusal`` says why it cannot do a problem exactly. ``auto_refusal`` says why
    "auto" should pass it over though it could; a request by name skips that.
    """

    name: str
    reason: str
    refusal: Callable[[Problem], str | None]
    auto_refusal: Callable[[Problem], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which implementation runs and why.

    ``passed_over`` has (name, why) of those that came before it and would not do.
    """

    implementation: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()


def _never(problem: Problem) -> str | None:
    return None


def _too_large(problem: Problem) -> str | None:
    if problem.scores_per_head <= SMALL_SCORES:
        return None
    return (
        f"{problem.q_len} x {problem.kv_len} scores per head are more than the "
        f"{SMALL_SCORES} up to which the whole matrix is built"
    )


def _not_on_tpu(problem: Problem) -> str | None:
    if problem.platform == "tpu":
        return None
    return f"splash is for TPU; the platform is {problem.platform!r}"


# In the order in which "auto" tries them. Blockwise refuses nothing and is last.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name="splash",
        reason="a fused TPU kernel takes this call",
        refusal=splash_refusal,
        auto_refusal=_not_on_tpu,
    ),
    Implementation(
        name="reference",
        reason="the score matrix is small enough to be built whole",
        refusal=_never,
        auto_refusal=_too_large,
    ),
    Implementation(
        name="blockwise",
        reason="the score matrix is too large to be built whole",
        refusal=_never,
        auto_refusal=_never,
    ),
)


def select(problem: Problem, implementation: str = AUTO) -> Selection:
    """The implementation that ``attention`` uses for this problem.

    Raises:
        AttentionError: the named implementation cannot do it exactly.
        UsageError: no implementation has that name.
    """
    if implementation != AUTO:
        found = _named(implementation)
        if why := found.refusal(problem):
            raise AttentionError(
                f"attention implementation {implementation!r} cannot do this call: "
                f"{why}. Use {AUTO!r} or another one."
            )
        return Selection(implementation=found.name, reason="asked for by name")
    passed_over: list[tuple[str, str]] = []
    for candidate in IMPLEMENTATIONS:
        why = candidate.auto_refusal(problem) or candidate.refusal(problem)
        if why is None:
            return Selection(
                implementation=candidate.name,
                reason=candidate.reason,
                passed_over=tuple(passed_over),
            )
        passed_over.append((candidate.name, why))
    raise AttentionError(
        "no attention implementation can do this call: "
        + "; ".join(f"{name}: {why}" for name, why in passed_over)
    )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kv_lengths: jax.Array | None = None,
    platform: str,
    implementation: str = AUTO,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scale q k^T + mask) v, exactly; see ``reference_attention``.

    Args:
        q: of shape [B, H, Lq, D].
        k: of shape [B, Hkv, Lk, D]; Hkv divides H.
        v: of shape [B, Hkv, Lk, Dv].
        mask: bool (True = may attend) or float (added to the scores), of four dims,
            each 1 or that of [B, H, Lq, Lk].
        is_causal: query i sees keys 0..i (aligned top left); combines with ``mask``.
        scale: factor of the scores; None means 1/sqrt(D).
        kv_lengths: integers of shape [B]; keys at an index >= length have weight 0.
        platform: "tpu", "cpu", ...: where the program will run. It is not looked up,
            because a program may be compiled for a device that is not attached.
        implementation: "auto" or a name of ``IMPLEMENTATIONS``.
        interpret: run Pallas kernels interpreted; others ignore it.

    Returns:
        of shape [B, H, Lq, Dv], in the dtype of ``q``; 0 where no key is allowed.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        AttentionError: the named implementation cannot do it exactly (also a
            NotImplementedError).
        UsageError: no implementation has that name.
    """
    problem = describe(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        kv_lengths=kv_lengths,
        platform=platform,
        interpret=interpret,
    )
    chosen = select(problem, implementation).implementation
    if chosen == "splash":
        return splash_attention(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            kv_lengths=kv_lengths,
            platform=platform,
            interpret=interpret,
        )
    run = reference_attention if chosen == "reference" else blockwise_attention
    return run(
        q, k, v, mask=mask, is_causal=is_causal, scale=scale, kv_lengths=kv_lengths
    )


def _named(name: str) -> Implementation:
    for candidate in IMPLEMENTATIONS:
        if candidate.name == name:
            return candidate
    known = ", ".join([AUTO, *(candidate.name for candidate in IMPLEMENTATIONS)])
    raise UsageError(f"unknown attention implementation {name!r}; known are: {known}")
