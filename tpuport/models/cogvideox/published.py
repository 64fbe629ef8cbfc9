"""Configs of the published checkpoints' components, and of the demos', by variant.

``published.json`` has them as a checkpoint's folders have: variant, component, config.
Only what decides shapes and numbers is there; the rest is defaults of the classes.

Sources: the configs of the checkpoints ``THUDM/CogVideoX*``, diffusers
``scripts/convert_cogvideox_to_diffusers.py``, and the defaults of the classes in
diffusers 0.42.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
