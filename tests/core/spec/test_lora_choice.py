"""A LoRA as it is asked for."""

from __future__ import annotations

import pytest

from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.errors import UsageError


@pytest.mark.parametrize("scale", ["inf", "-inf", "nan", "1e400"])
def test_a_scale_that_is_not_finite_is_refused(scale: str) -> None:
    said = "'me/lora': the scale .* is not a finite number; give a number such as 0.8"
    with pytest.raises(UsageError, match=said):
        LoraChoice("me/lora", float(scale))
    with pytest.raises(UsageError, match=said):
        LoraChoice.parse(f"me/lora:transformer_2:{scale}")
