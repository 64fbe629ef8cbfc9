"""Configs of the published checkpoints' components, and of the demos', by form.

``published.json`` has them as a checkpoint's folders have: form, component, config.
Only what decides shapes and numbers is there; the rest is defaults of the classes.
"1.5" is the 480p text-to-video model; the variants' own values are in ``config.py``.

- ``text_encoder``: the text part of Qwen2.5-VL-7B; of 13b, the language model of
  llava-llama-3-8b. The demos initialise theirs with 0.08: at the usual 0.02 a model of
  that width hardly looks at its input.
- ``text_encoder_2``: google/byt5-small with the words for colours and fonts that Glyph
  adds; of 13b, the text part of CLIP ViT-L/14, which finds the end-of-text token as
  the highest id. The 1.5 demo has six heads as ByT5 small has: no power of two divides
  six.
- ``image_encoder``: SigLIP so400m, 384 pixels in patches of 14: 729 tokens.

Sources: the configs of the checkpoints ``hunyuanvideo-community/HunyuanVideo-1.5-*``
and ``hunyuanvideo-community/HunyuanVideo``, and the defaults of their classes in
diffusers 0.42.1.
"""

from __future__ import annotations

from tpuport.core.spec.variant import read_configs

CONFIGS = read_configs(__file__)
