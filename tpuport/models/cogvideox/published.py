"""Configs of the published checkpoints' components, and of the demos', by variant.

``published.json`` has them as a checkpoint's folders have: variant, component, config.
Only what decides shapes and numbers is there; the rest is defaults of the classes.

Sources: the configs of the checkpoints ``THUDM/CogVideoX*``, diffusers
``scripts/convert_cogvideox_to_diffusers.py``, and the defaults of the classes in
diffusers 0.42.1.
"""

from __future__ import annotations

from tpuport.core.spec.variant import read_configs

CONFIGS = read_configs(__file__)
