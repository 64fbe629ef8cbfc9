"""The mesh spec: what can be written, what fits, and what the messages say."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import AXES, MeshSpec
from tpuport.errors import MeshError

EXAMPLE = 'write for example "dp=2,tp=4" or "2,1,4" (dp, sp, tp)'


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(MeshError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


class TestSpec:
    def test_text_size_and_shape_keep_the_order_of_the_axes(self) -> None:
        spec = MeshSpec(tp=4, dp=2)
        assert AXES == ("dp", "sp", "tp")
        assert str(spec) == "dp=2,sp=1,tp=4"
        assert spec.size == 8
        assert list(spec.shape.items()) == [("dp", 2), ("sp", 1), ("tp", 4)]

    @pytest.mark.parametrize(
        ("sizes", "says"),
        [
            *(
                (
                    {"sp": size},
                    f"mesh axis sp is {size}; an axis is at least 1, or -1 for the "
                    "devices that are left",
                )
                for size in (0, -2)
            ),
            *(
                ({"tp": size}, f"mesh axis tp is {size!r}, not an integer; {EXAMPLE}")
                for size in (2.0, True, "2", None)
            ),
            (
                {"dp": -1, "tp": -1},
                "mesh dp=-1,sp=1,tp=-1 leaves dp and tp open; only one axis can be -1",
            ),
        ],
        ids=str,
    )
    def test_sizes_that_are_none_are_refused(self, sizes: Any, says: str) -> None:
        assert message(MeshSpec, **sizes) == says

    @pytest.mark.parametrize("attribute", ["size", "shape"])
    def test_an_open_mesh_has_no_size(self, attribute: str) -> None:
        assert message(getattr, MeshSpec(tp=-1), attribute) == (
            "mesh dp=1,sp=1,tp=-1 has no size before resolve(device_count) fills the -1"
        )


class TestParse:
    @pytest.mark.parametrize(
        "value",
        [
            "dp=2,tp=4",
            " tp = 4 , dp = 2 ",
            "2,1,4",
            "2, 1, 4",
            {"dp": 2, "tp": 4},
            {"dp": "2", "tp": "4"},
            (2, 1, 4),
            [2, 1, 4],
            MeshSpec(dp=2, tp=4),
        ],
    )
    def test_every_way_to_write_a_mesh(self, value: Any) -> None:
        assert MeshSpec.parse(value) == MeshSpec(dp=2, sp=1, tp=4)

    def test_nothing_is_one_device_and_minus_one_is_kept(self) -> None:
        assert MeshSpec.parse(None) == MeshSpec() == MeshSpec(dp=1, sp=1, tp=1)
        assert MeshSpec.parse("dp=2,sp=1,tp=-1") == MeshSpec(dp=2, tp=-1)

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("dp=2,pp=4", ": unknown axis 'pp', the axes are dp, sp, tp"),
            ({"x": 1}, ": unknown axis 'x', the axes are dp, sp, tp"),
            ("dp=2,dp=2", ": axis 'dp' is given twice"),
            ("tp=four", ": axis 'tp' is 'four', not an integer"),
            ("tp=", ": axis 'tp' is '', not an integer"),
            ("tp=1=2", ": axis 'tp' is '1=2', not an integer"),
            ("2,1,4.0", ": axis 'tp' is '4.0', not an integer"),
            ((2, 1, 4.0), ": axis 'tp' is 4.0, not an integer"),
            ({"tp": True}, ": axis 'tp' is True, not an integer"),
            ("dp=2,4", ": '4' is not axis=size"),
            ("dp=2,", ": '' is not axis=size"),
            ("", " is not understood"),
            ("2x4", " is not understood"),
            ("2,4", " gives 2 of 3 sizes"),
            ("8", " gives 1 of 3 sizes"),
            ((1, 1, 1, 1), " gives 4 of 3 sizes"),
            (8, " cannot be read"),
        ],
    )
    def test_what_cannot_be_read_is_named_with_an_example(
        self, value: Any, says: str
    ) -> None:
        assert message(MeshSpec.parse, value) == f"mesh {value!r}{says}; {EXAMPLE}"


class TestResolve:
    @pytest.mark.parametrize(
        ("asked", "devices", "resolved"),
        [
            ("tp=-1", 8, "dp=1,sp=1,tp=8"),
            ("dp=2,tp=-1", 8, "dp=2,sp=1,tp=4"),
            ("dp=2,sp=-1,tp=4", 8, "dp=2,sp=1,tp=4"),
            ("dp=2,tp=4", 8, "dp=2,sp=1,tp=4"),
            ("dp=2,tp=2", 8, "dp=2,sp=1,tp=2"),
        ],
    )
    def test_minus_one_takes_what_is_left(
        self, asked: str, devices: int, resolved: str
    ) -> None:
        assert str(MeshSpec.parse(asked).resolve(devices)) == resolved

    @pytest.mark.parametrize(
        ("asked", "needs", "fits"),
        [
            ("dp=2,tp=8", "dp=2,sp=1,tp=8 needs 16", "dp=2,sp=1,tp=4"),
            ("dp=4,sp=3", "dp=4,sp=3,tp=1 needs 12", "dp=4,sp=2,tp=1"),
            ("sp=9", "dp=1,sp=9,tp=1 needs 9", "dp=1,sp=8,tp=1"),
            ("dp=-1,sp=3", "dp=-1,sp=3,tp=1 needs a multiple of 3", "dp=-1,sp=1,tp=1"),
            ("dp=3,tp=-1", "dp=3,sp=1,tp=-1 needs a multiple of 3", "dp=1,sp=1,tp=-1"),
            (
                "dp=2,sp=-1,tp=8",
                "dp=2,sp=-1,tp=8 needs a multiple of 16",
                "dp=2,sp=-1,tp=4",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_with_one_that_does(
        self, asked: str, needs: str, fits: str
    ) -> None:
        says = f"mesh {needs} devices, there are 8; try {fits}"
        assert message(MeshSpec.parse(asked).resolve, 8) == says
        assert MeshSpec.parse(fits).resolve(8).size <= 8
        none = "mesh dp=1,sp=1,tp=1 needs devices, there are 0"
        assert message(MeshSpec().resolve, 0) == none


def test_dp_alone_goes_across_slices() -> None:
    assert MeshSpec(dp=4, sp=8).within(2, 32) == MeshSpec(dp=2, sp=8)
    assert MeshSpec(dp=3).within(1, 8) == MeshSpec(dp=3)
    for spec, fits in (
        (MeshSpec(sp=16), "dp=2,sp=8,tp=1"),
        (MeshSpec(dp=3, tp=4), "dp=2,sp=1,tp=4"),
    ):
        said = f"so it is a multiple of 2; try {fits}"
        assert message(spec.within, 2, 16).endswith(said)
        assert MeshSpec.parse(fits).within(2, 16)


def test_a_mesh_is_of_the_first_devices_in_their_order() -> None:
    mesh = build_mesh(MeshSpec(dp=2, tp=3))
    assert mesh.axis_names == ("dp", "sp", "tp")
    assert dict(mesh.shape) == {"dp": 2, "sp": 1, "tp": 3}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 3
    assert list(mesh.devices.flat) == jax.devices()[:6]
    assert dict(build_mesh(MeshSpec(dp=2, tp=-1)).shape)["tp"] == 4
    assert build_mesh(MeshSpec(tp=-1), jax.devices()[:3]).size == 3
