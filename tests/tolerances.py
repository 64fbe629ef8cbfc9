"""How far a result may be from the truth: the only table of tolerances of the tests.

Each entry is a largest absolute error against a float64 computation (or a named
twin) for inputs of about unit variance. Loosening an entry needs its reason in the
commit: a result that moved is a finding before it is a tolerance.
"""

from __future__ import annotations

TOLERANCES: dict[str, float] = {
    # Outputs are weighted means of unit normals; float32 rounding of the scores and
    # sums, which a float mask brings to 10, leaves up to 4e-6 on the sizes tested.
    "attention float32": 6e-6,
    # Against float64 on the same bfloat16 inputs: the output's own rounding, half a
    # unit in the last place of values up to 4.
    "attention bfloat16": 1e-2,
    # The same with q rounded once more by a scale that is no power of two.
    "attention bfloat16 scaled q": 2e-2,
    # Scores in the hundreds: a float32 score of 500 is off by up to 3e-5, and so is
    # its weight.
    "attention float32 large scores": 3e-4,
    # torch's own scaled_dot_product_attention in float32, the same on any mesh.
    "attention torch float32": 1e-5,
    # Against float64 on the same bfloat16 inputs, over the result where that is above
    # 1: half a unit in the last place, 1/256, and a little.
    "product bfloat16": 4e-3,
    # torch's own norms in float32: two ways of rounding the statistics.
    "norm float32": 1e-5,
    # Against float64 at a mean of 1000: the input's own rounding is 6e-5, which the
    # norm keeps; E[x^2] - E[x]^2 is off by 0.1 and more.
    "norm float32 large mean": 2e-3,
    # torch's own module in float32, through torchax: one rounding a layer.
    "module float32": 1e-5,
    # A tiny CogVideoX transformer of three layers under jit against torch, float32.
    "transformer float32": 1e-5,
    # Any component of a model against upstream's own code, float32.
    "component float32": 1e-5,
    # Whole videos in [0, 1] and their latents, from the seed, float32.
    "video float32": 1e-4,
    # A LoRA in a weight against upstream's fuse_lora, float32.
    "fused weight": 1e-5,
    # Eight devices against one, float32.
    "mesh float32": 1e-5,
}
