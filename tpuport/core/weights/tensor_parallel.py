"""Sharding rules of layers by what becomes of them over ``tp``.

torch stores Linear weights as [out, in]: a column-parallel layer splits dim 0 and its
bias, a row-parallel layer splits dim 1 and keeps its bias whole. Layers are regexes.
"""

from __future__ import annotations

from dataclasses import replace

from tpuport.core.weights.sharding import ShardRule, Spec

COLUMN: Spec = ("tp", None)
ROW: Spec = (None, "tp")

Rules = tuple[ShardRule, ...]


def column(layers: str, *, bias: bool = True, note: str = "") -> Rules:
    """Layers whose outputs are split, so their biases as well."""
    rules = (
        ShardRule(pattern=layers + r"\.weight", spec=COLUMN, note=note),
        ShardRule(pattern=layers + r"\.bias", spec=("tp",)),
    )
    return rules if bias else rules[:1]


def row(layers: str, *, bias: bool = True, note: str = "") -> Rules:
    """Layers whose inputs are split and whose outputs are summed over tp."""
    rules = (
        ShardRule(pattern=layers + r"\.weight", spec=ROW, note=note),
        ShardRule(pattern=layers + r"\.bias", spec=()),
    )
    return rules if bias else rules[:1]


def replicated(
    *layers: str,
    leaves: str = "(weight|bias)",
    within: str = "",
    optional: bool = False,
    note: str = "",
) -> Rules:
    """One rule for layers that every device holds.

    Args:
        leaves: the names of their weights.
        within: what stands in front of each of ``layers``.
        optional: there may be none of them.
        note: why they are whole.
    """
    pattern = layers[0] if len(layers) == 1 else f"({'|'.join(layers)})"
    return (
        ShardRule(
            pattern=rf"{within}{pattern}\.{leaves}",
            spec=(),
            optional=optional,
            note=note,
        ),
    )


def where_there_are(*rules: ShardRule) -> Rules:
    """Rules of blocks that a legal config may have none of."""
    return tuple(replace(rule, optional=True) for rule in rules)
