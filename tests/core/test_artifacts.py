"""The public door: every name that other parts of tpuport may import from it."""

from __future__ import annotations

from tpuport.core import artifacts


def test_the_door_has_what_it_lists_and_lists_what_it_has() -> None:
    public = {name for name in vars(artifacts) if not name.startswith("_")}
    assert public - {"annotations"} == set(artifacts.__all__)
