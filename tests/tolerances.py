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
}
