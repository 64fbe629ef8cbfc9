"""The "upstream" of toy_stages: three tiny diffusers modules.

Legend: B videos, L tokens, W width, T/Y/X frames, rows, columns, C channels.
"""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class ToyEncoder(ModelMixin, ConfigMixin):
    """Letters [B, L] -> embeddings [B, L, W]."""

    @register_to_config
    def __init__(self, letters: int = 128, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(letters, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.embed(ids)


class ToyTransformer(ModelMixin, ConfigMixin):
    """Latents [B, T, C, Y, X] attend to embeddings [B, L, W]."""

    @register_to_config
    def __init__(self, channels: int = 8, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = torch.nn.Linear(channels, width)
        self.to_out = torch.nn.Linear(width, channels)

    def forward(self, latents: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = latents.movedim(2, -1)
        q = self.to_q(x.flatten(1, 3)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = embeds.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, kv, kv)
        out = self.to_out(out.transpose(1, 2).flatten(2))
        return out.reshape(x.shape).movedim(-1, 2)


class ToyDecoder(ModelMixin, ConfigMixin):
    """Latents [B, T, C, Y, X] -> frames [B, T, Y, X, 3] in [0, 1]."""

    @register_to_config
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.to_rgb = torch.nn.Linear(channels, 3)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.sigmoid(self.to_rgb(latents.movedim(2, -1)))
