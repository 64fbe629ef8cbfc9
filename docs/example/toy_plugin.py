"""A plugin for LTX-Video: how weights are split, and attention for the chip."""

from tpuport import plugin


def halves(upstream):
    """Attention that turns halves of a head, where upstream's turns neighbours."""
    import torch

    def attend(self, attn, x, text=None, mask=None, rotary=None):
        if rotary is None:
            return upstream(self, attn, x, text, mask)
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        cos, sin = (t[..., ::2].unflatten(2, (attn.heads, -1)) for t in rotary)

        def turned(heads):
            a, b = heads.unflatten(2, (attn.heads, -1)).float().chunk(2, dim=-1)
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            return out.to(x.dtype).transpose(1, 2)

        v = v.unflatten(2, (attn.heads, -1)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(turned(q), turned(k), v)
        return attn.to_out[0](out.transpose(1, 2).flatten(2))

    return attend


def native():
    target = "models.transformers.transformer_ltx:LTXVideoAttnProcessor.__call__"
    why = "a TPU is slow to turn neighbours"
    moved = plugin.WeightTransform(
        pattern=r".*attn1\.(to|norm)_[qk]\.(weight|bias)",
        apply=lambda tensor, c: plugin.to_halves(tensor, c["attention_head_dim"]),
        reason="neighbours go to the halves of their head",
    )
    patch = plugin.diffusers_patch("ltx_halves", target, halves, why, wraps=True)
    return plugin.NativeForm(patches=(patch,), transforms=(moved,))


SPLIT = {
    r"(to_[qkv]|net\.0\.proj)\.weight": ("tp", None),
    r"(to_[qkv]|net\.0\.proj)\.bias|norm_[qk]\.weight": ("tp",),
    r"(to_out\.0|net\.2)\.weight": (None, "tp"),
}
PLUGIN = plugin.ModelPlugin(
    "ltx",
    claims="diffusers:LTXPipeline",
    modules={"transformer": plugin.Module(layout=SPLIT, native=native)},
    variants={
        "small": plugin.Published(configs="ltx_small.json"),
        "0.9": plugin.Published("Lightricks/LTX-Video", configs="ltx_0_9.json"),
    },
)


@plugin.hookimpl
def tpuport_model():
    return PLUGIN
