"""How tensor parallelism splits the weights of both transformers.

Column parallel layers split their outputs over tp, row parallel layers their inputs.
What has no pattern is whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tpuport.plugin import Layout

Whole = Literal["attention", "outputs"] | None

#: Those of a norm's shift, scale and gate, which follow from the time.
_MODULATION = r"norm(1|1_context|_out)?\.linear"
_HEADS = r"attn\.(to_[qkv]|add_[qkv]_proj)"


def layout(*, singles: bool, whole: Whole = None) -> Layout:
    """The table of a transformer.

    Args:
        singles: it has blocks of one stream, as HunyuanVideo (13B) has.
        whole: what else each device holds whole, at the price of memory.
            ``"attention"``: the last layer of every attention, and the hidden states
            between blocks, so that attention is gathered once instead of gathered and
            summed. ``"outputs"``: the last layers of attention and of feed-forward, so
            that nothing is summed; but the hidden layer of the feed-forward, four times
            as wide, is gathered.
    """
    columns = [_HEADS, r"ff(_context)?\.net\.0\.proj"]
    rows = []
    if singles:
        columns.append(r"single_transformer_blocks\.\d+\.proj_mlp")
    if whole != "outputs":
        rows.append(r"ff(_context)?\.net\.2")
        if singles:
            # On attention and feed-forward, which are added up by themselves.
            rows.append(r"single_transformer_blocks\.\d+\.proj_out")
    if whole is None:
        rows.append(r"attn\.(to_out\.0|to_add_out)")
    # Split by output, they split the hidden states over tp as well, which are gathered
    # before every attention and feed-forward. Split by input, they leave them whole.
    (rows if whole == "attention" else columns).append(_MODULATION)
    table: dict[str, tuple[str | None, ...]] = {}
    for pattern in columns:
        table[rf"{pattern}\.weight"] = ("tp", None)
        table[rf"{pattern}\.bias"] = ("tp",)
    for pattern in rows:
        table[rf"{pattern}\.weight"] = (None, "tp")
    return table


def layouts(*, singles: bool) -> Mapping[str, Layout]:
    """What ``--sharding NAME`` takes, with the tables of a transformer."""
    return {
        "replicated-attention": layout(singles=singles, whole="attention"),
        "replicated-out": layout(singles=singles, whole="outputs"),
    }
