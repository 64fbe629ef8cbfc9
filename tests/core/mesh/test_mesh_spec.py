"""The mesh spec: what can be written, what fits, and what the messages say."""

from __future__ import annotations

from typing import Any

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
    def test_axes_are_one_unless_given(self) -> None:
        assert MeshSpec() == MeshSpec(dp=1, sp=1, tp=1)

    def test_text_size_and_shape_keep_the_order_of_the_axes(self) -> None:
        spec = MeshSpec(tp=4, dp=2)
        assert AXES == ("dp", "sp", "tp")
        assert str(spec) == "dp=2,sp=1,tp=4"
        assert spec.size == 8
        assert list(spec.shape.items()) == [("dp", 2), ("sp", 1), ("tp", 4)]

    def test_text_parses_back(self) -> None:
        spec = MeshSpec(dp=2, sp=3, tp=-1)
        assert MeshSpec.parse(str(spec)) == spec

    @pytest.mark.parametrize("size", [0, -2])
    def test_an_axis_below_one_is_refused(self, size: int) -> None:
        assert message(MeshSpec, sp=size) == (
            f"mesh axis sp is {size}; an axis is at least 1, "
            "or -1 for the devices that are left"
        )

    @pytest.mark.parametrize("size", [2.0, True, "2", None])
    def test_an_axis_that_is_no_integer_is_refused(self, size: Any) -> None:
        assert message(MeshSpec, tp=size) == (
            f"mesh axis tp is {size!r}, not an integer; {EXAMPLE}"
        )

    def test_two_open_axes_are_refused(self) -> None:
        assert message(MeshSpec, dp=-1, tp=-1) == (
            "mesh dp=-1,sp=1,tp=-1 leaves dp and tp open; only one axis can be -1"
        )

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

    def test_nothing_is_one_device(self) -> None:
        assert MeshSpec.parse(None) == MeshSpec()

    def test_minus_one_is_kept_for_resolve(self) -> None:
        assert MeshSpec.parse("dp=2,tp=-1") == MeshSpec(dp=2, tp=-1)

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (
                "dp=2,pp=4",
                "mesh 'dp=2,pp=4': unknown axis 'pp', the axes are dp, sp, tp",
            ),
            ({"x": 1}, "mesh {'x': 1}: unknown axis 'x', the axes are dp, sp, tp"),
            ("dp=2,dp=2", "mesh 'dp=2,dp=2': axis 'dp' is given twice"),
            ("tp=four", "mesh 'tp=four': axis 'tp' is 'four', not an integer"),
            ("tp=", "mesh 'tp=': axis 'tp' is '', not an integer"),
            ("tp=1=2", "mesh 'tp=1=2': axis 'tp' is '1=2', not an integer"),
            ("2,1,4.0", "mesh '2,1,4.0': axis 'tp' is '4.0', not an integer"),
            ((2, 1, 4.0), "mesh (2, 1, 4.0): axis 'tp' is 4.0, not an integer"),
            ({"tp": True}, "mesh {'tp': True}: axis 'tp' is True, not an integer"),
            ("dp=2,4", "mesh 'dp=2,4': '4' is not axis=size"),
            ("dp=2,", "mesh 'dp=2,': '' is not axis=size"),
            ("", "mesh '' is not understood"),
            ("2x4", "mesh '2x4' is not understood"),
            ("2,4", "mesh '2,4' gives 2 of 3 sizes"),
            ("8", "mesh '8' gives 1 of 3 sizes"),
            ((1, 1, 1, 1), "mesh (1, 1, 1, 1) gives 4 of 3 sizes"),
            (8, "mesh 8 cannot be read"),
        ],
    )
    def test_what_cannot_be_read_is_named_with_an_example(
        self, value: Any, says: str
    ) -> None:
        assert message(MeshSpec.parse, value) == f"{says}; {EXAMPLE}"


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
        ("asked", "says"),
        [
            (
                "dp=2,tp=8",
                "mesh dp=2,sp=1,tp=8 needs 16 devices, there are 8; try dp=2,sp=1,tp=4",
            ),
            (
                "dp=4,sp=3",
                "mesh dp=4,sp=3,tp=1 needs 12 devices, there are 8; try dp=4,sp=2,tp=1",
            ),
            (
                "sp=9",
                "mesh dp=1,sp=9,tp=1 needs 9 devices, there are 8; try dp=1,sp=8,tp=1",
            ),
            (
                "dp=-1,sp=3",
                "mesh dp=-1,sp=3,tp=1 needs a multiple of 3 devices, "
                "there are 8; try dp=-1,sp=1,tp=1",
            ),
            (
                "dp=3,tp=-1",
                "mesh dp=3,sp=1,tp=-1 needs a multiple of 3 devices, "
                "there are 8; try dp=1,sp=1,tp=-1",
            ),
            (
                "dp=2,sp=-1,tp=8",
                "mesh dp=2,sp=-1,tp=8 needs a multiple of 16 devices, "
                "there are 8; try dp=2,sp=-1,tp=4",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_with_one_that_does(
        self, asked: str, says: str
    ) -> None:
        assert message(MeshSpec.parse(asked).resolve, 8) == says
        suggestion = says.rsplit("try ", 1)[1]
        assert MeshSpec.parse(suggestion).resolve(8).size <= 8

    def test_no_device_is_refused(self) -> None:
        assert message(MeshSpec().resolve, 0) == (
            "mesh dp=1,sp=1,tp=1 needs devices, there are 0"
        )


class TestBuildMesh:
    def test_axes_order_and_type(self) -> None:
        import jax

        mesh = build_mesh(MeshSpec(dp=2, sp=1, tp=4))
        assert mesh.axis_names == ("dp", "sp", "tp")
        assert dict(mesh.shape) == {"dp": 2, "sp": 1, "tp": 4}
        assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 3

    def test_the_first_devices_are_used_in_their_order(self) -> None:
        import jax

        mesh = build_mesh(MeshSpec(dp=2, tp=3))
        assert list(mesh.devices.flat) == jax.devices()[:6]

    def test_minus_one_takes_the_devices_given(self) -> None:
        import jax

        assert dict(build_mesh(MeshSpec(dp=2, tp=-1)).shape)["tp"] == 4
        assert build_mesh(MeshSpec(tp=-1), jax.devices()[:3]).size == 3
