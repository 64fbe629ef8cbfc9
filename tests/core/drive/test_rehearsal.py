"""What a rehearsal says of a call beside its programs."""

from __future__ import annotations

from types import SimpleNamespace

from tpuport.core.drive.rehearsal import _size_of


class Pipeline:
    """With a default in the signature, one that is computed, and none of a width."""

    def __call__(
        self, frames: int = 19, height: int | None = None, width: int | None = None
    ) -> None:
        self.check_inputs(height or 480, width)

    def check_inputs(self, height: int, width: int | None) -> None:
        self.checked = height, width


def test_the_size_of_a_call_has_upstreams_defaults() -> None:
    pipeline = Pipeline()
    with _size_of(pipeline, {"width": 64}) as found:
        assert found == {"num_frames": 19, "width": 64}
        pipeline(width=64)
    assert found == {"num_frames": 19, "height": 480, "width": 64}
    assert pipeline.checked == (480, 64)
    assert "check_inputs" not in vars(pipeline)
    with _size_of(pipeline, {"frames": 5, "height": 96}) as found:
        pipeline(5, 96)
    assert found == {"num_frames": 5, "height": 96}


def test_frames_that_a_pipeline_takes_of_its_denoisers_config_are_told() -> None:
    class OfConfig:
        transformer = SimpleNamespace(config=SimpleNamespace(sample_frames=49))

        def __call__(self, num_frames: int | None = None) -> None:
            pass

    for given, frames in (({}, 49), ({"num_frames": 9}, 9)):
        with _size_of(OfConfig(), given) as found:
            assert found == {"num_frames": frames}
