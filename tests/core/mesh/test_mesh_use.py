"""A mesh with an axis that a program cannot use is refused; other meshes are not."""

from __future__ import annotations

import pytest

from tpuport.core.mesh.mesh_use import check_used, undivided
from tpuport.errors import MeshError

QUERIES = (1, 2, 24, 16)


def test_an_axis_that_splits_something_is_used() -> None:
    mesh = {"dp": 2, "sp": 3, "tp": 4}
    # dp=2 is for guidance; tp splits a weight.
    check_used("transformer", mesh, [(QUERIES, (None, None, "sp", None))], [("tp",)])
    check_used("transformer", mesh, [])
    nested = [(("dp", "tp"), None)]
    check_used("transformer", {"dp": 4, "tp": 4}, [(QUERIES, (None,))], nested)


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"dp": 3, "sp": 2}, "dp=3: transformer has no rows.* has 1.*use sp=6"),
        ({"dp": 1, "tp": 3}, "tp=3: transformer has no heads.* has 2.*use sp=3"),
    ],
)
def test_an_axis_without_use_is_told(mesh: dict[str, int], told: str) -> None:
    with pytest.raises(MeshError, match=told):
        check_used("transformer", mesh, [(QUERIES, (None, None, "sp", None))])


@pytest.mark.parametrize(
    ("mesh", "heads", "told"),
    [
        (
            {"tp": 5, "sp": 2},
            4,
            "5 divides neither the 4 heads nor sides 24 and 32 long of the weights of "
            "transformer; tp=2 or 4 would; sp splits tokens among any number of "
            "devices: use sp=10",
        ),
        (
            {"tp": 6},
            None,
            "6 divides no sides 32 long of the weights of transformer; tp=2 or 4 or 8 "
            "would; sp splits tokens among any number of devices: use sp=6",
        ),
    ],
)
def test_a_mesh_that_divides_no_weights_is_told_what_would(
    mesh: dict[str, int], heads: int | None, told: str
) -> None:
    error = undivided("transformer", mesh, {("tp",): {24, 32}}, heads)
    assert str(error) == f"mesh tp={mesh['tp']}: {told}"
