"""Another implementation of a component: what is put in place, loaded and recorded.

The toy's transformer once more in JAX, with its weights the other way round: a sum that
is not turned with them, or split as they are stored, gives another video or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.torch import load_file

import tpuport
from tests.core.spec.toys import Heard, installed_toy
from tests.tolerances import TOLERANCES
from tpuport import plugins
from tpuport.core.programs.program_key import session_fields
from tpuport.core.reports import StageReport
from tpuport.core.spec.choices import check_chosen, choices, with_chosen
from tpuport.core.spec.component import Component, Implementation
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.stage import Program
from tpuport.core.weights.jax_module import BoundJaxModule, Weight, WeightMap
from tpuport.errors import PluginError, UsageError, WeightsError

NAME = "transformer"
ASKED: dict[str, Any] = {"prompt": ["a cat", "a dog"], "seed": [1, 2]}


class ToyWeights(WeightMap):
    """``to_q.weight`` [W, C] is ``q.kernel`` [C, W]; and so on."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config["channels"] % 2:
            raise NotImplementedError("an odd number of channels")
        self.heads = int(config["heads"])
        wide, channels = int(config["width"]), int(config["channels"])
        found = [
            Weight("q.kernel", "to_q.weight", (1, 0), (channels, wide)),
            Weight("q.bias", "to_q.bias", (0,), (wide,)),
            Weight("out.kernel", "to_out.weight", (1, 0), (wide, channels)),
            Weight("out.bias", "to_out.bias", (0,), (channels,)),
        ]
        super().__init__("toy", found)

    def bind(self, arrays: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
        def forward(latents: Any, embeds: Any) -> Any:
            x = jnp.moveaxis(latents, 2, -1)
            flat = x.reshape(x.shape[0], -1, x.shape[-1])
            q = jnp.matmul(flat, arrays["q.kernel"]) + arrays["q.bias"]
            q, kv = (y.reshape(*y.shape[:2], self.heads, -1) for y in (q, embeds))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, kv) / jnp.sqrt(q.shape[-1])
            out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), kv)
            out = out.reshape(*flat.shape[:2], -1) @ arrays["out.kernel"]
            out = (out + arrays["out.bias"]).reshape(x.shape)
            return jnp.moveaxis(out, -1, 2)

        return forward


def step(
    model: BoundJaxModule, carry: Any, constants: Any, inputs: Any
) -> tuple[Any, None]:
    latents = model.constrain(carry, "dp")
    return carry + inputs["size"] * model.module()(latents, constants), None


STEP = Program(component=NAME, fn=step)
PLAIN = Implementation(
    weights=ToyWeights, programs={"denoise": {"step": STEP}}, packages=("flax",)
)


def offering(port: ModelPort, found: Implementation = PLAIN) -> ModelPort:
    """The port with its transformer in JAX to choose, under the name ``plain``."""
    component = replace(port.components[NAME], implementations={"plain": found})
    return replace(port, components={**port.components, NAME: component})


def chosen(port: ModelPort) -> ModelPort:
    return with_chosen(offering(port), {NAME: "plain"})


@pytest.fixture(scope="module")
def toy() -> Iterator[ModelPort]:
    """The toy as it is installed, with one implementation."""
    with installed_toy() as plugin:
        yield plugin.model


@pytest.fixture
def install(
    toy: ModelPort, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModelPort], None]:
    """``tpuport.load("toy")`` finds this port."""
    (name, plugin), *_ = plugins.installed_plugins().items()

    def install(port: ModelPort) -> None:
        found = {name: replace(plugin, model=port)}
        monkeypatch.setattr(plugins, "installed_plugins", lambda: found)

    return install


# --- what is put in place


def test_programs_of_the_component_are_replaced_and_no_others(toy: ModelPort) -> None:
    port = offering(toy)
    found = chosen(toy)
    assert (choices(port), choices(found)) == ({NAME: "torchax"}, {NAME: "plain"})
    assert choices(toy) == choices(found, ["vae"]) == {}
    assert found.stage("denoise").programs == {"step": STEP}
    for name in ("encode", "decode"):
        assert found.stage(name) is port.stage(name)
    assert with_chosen(port, {NAME: "torchax"}) is port
    assert with_chosen(found, {NAME: "plain"}) is found
    with pytest.raises(UsageError, match="toy already has the plain transformer"):
        with_chosen(found, {NAME: "torchax"})


def test_what_upstreams_class_alone_has_is_left_out(toy: ModelPort) -> None:
    port = offering(toy)
    cut: Component = replace(port.components[NAME], stacked=("blocks",))
    found = with_chosen(
        replace(port, components={**port.components, NAME: cut}), {NAME: "plain"}
    )
    assert found.components[NAME].stacked == ()
    assert found.components[NAME].sharding is cut.sharding


def test_what_there_is_not_is_refused_with_what_there_is(toy: ModelPort) -> None:
    port = offering(toy)
    for refuse in (check_chosen, with_chosen):
        with pytest.raises(UsageError) as caught:
            refuse(port, {NAME: "fast"})
        assert str(caught.value) == "transformer 'fast': toy has torchax, plain"
        with pytest.raises(UsageError, match=r"vae 'plain': toy has torchax$"):
            refuse(port, {"vae": "plain"})
        with pytest.raises(UsageError, match=r"ear 'plain': toy has no ear$"):
            refuse(port, {"ear": "plain"})
        # What every component has is never refused.
        refuse(port, {"ear": "torchax", "vae": "torchax"})


def test_a_form_may_lack_what_another_form_has(toy: ModelPort) -> None:
    port = replace(toy, forms=(replace(offering(toy), form="other"),))
    check_chosen(port, {NAME: "plain"})
    with pytest.raises(UsageError, match=r"toy has torchax$"):
        with_chosen(port, {NAME: "plain"})
    assert choices(with_chosen(port.forms[0], {NAME: "plain"})) == {NAME: "plain"}


@pytest.mark.parametrize(
    ("programs", "named"),
    [
        ({}, "step"),
        ({"denoise": {"step": STEP, "more": STEP}}, "more"),
        ({"denoise": {"step": replace(STEP, component="vae")}}, "step"),
        ({"denoise": {"step": STEP}, "decode": {"run": STEP}}, "run"),
    ],
    ids=["none", "one too many", "of another component", "of another stage"],
)
def test_every_program_and_no_other_is_needed(
    toy: ModelPort, programs: Any, named: str
) -> None:
    port = offering(toy, replace(PLAIN, programs=programs))
    with pytest.raises(PluginError, match=f"other programs of the stage .*: {named}"):
        with_chosen(port, {NAME: "plain"})


# --- what runs


def run(mesh: str, cache: Path, **options: Any) -> tuple[Any, Any]:
    with tpuport.load("toy", mesh=mesh, cache_dir=cache, **options) as session:
        return session.generate(**ASKED), session


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=4"])
def test_it_gives_what_upstreams_class_gives(
    mesh: str, toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    theirs, _ = run(mesh, tmp_path)
    install(chosen(toy))
    ours, _ = run(mesh, tmp_path)
    difference = float((ours.latents - theirs.latents).abs().max())
    assert difference <= TOLERANCES["mesh float32"]
    assert ours.report.implementations == {NAME: "plain"}
    assert theirs.report.implementations == {}


def test_weights_are_turned_and_split_as_they_are_stored(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    install(chosen(toy))
    with tpuport.load("toy", mesh="dp=2,tp=4", cache_dir=tmp_path) as session:
        wanted = session.components.abstract(NAME).weights
        found = session.components.load(NAME)
        (file,) = (session.checkpoint.folder / NAME).glob("*.safetensors")
        stored = load_file(file)
        assert {n: a.sharding.spec for n, a in found.weights.items()} == {
            "q.kernel": PartitionSpec(None, "tp"),
            "q.bias": PartitionSpec("tp"),
            "out.kernel": PartitionSpec("tp", None),
            "out.bias": PartitionSpec(None),
        }
        # The plan is about what is stored, whatever runs.
        assert set(found.plan.assignments) == set(stored)
        for name, key in (("q.kernel", "to_q.weight"), ("out.kernel", "to_out.weight")):
            np.testing.assert_array_equal(
                np.asarray(found.weights[name]), stored[key].mT
            )
            struct = wanted[name]
            array = found.weights[name]
            assert (struct.shape, struct.dtype) == (array.shape, array.dtype)
            assert struct.sharding == array.sharding
        part = session.components.abstract(NAME, (r"to_q\..*",)).weights
        assert set(part) == {"q.kernel", "q.bias"}


def test_a_config_that_it_cannot_run_is_refused_before_any_work(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    def refuse(config: Any) -> Any:
        raise NotImplementedError("heads of three")

    install(chosen(toy))
    port = with_chosen(offering(toy, replace(PLAIN, weights=refuse)), {NAME: "plain"})
    install(port)
    heard = Heard()
    with (
        tpuport.load("toy", cache_dir=tmp_path, reporter=heard) as session,
        pytest.raises(UsageError, match=r"'plain' cannot run .*: heads of"),
    ):
        session.generate(**ASKED)
    assert not heard.about("compiling")


def test_a_weight_that_it_does_not_account_for_is_refused(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    class Less(ToyWeights):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            del self.by_stored_name["to_out.bias"]

    port = offering(toy, replace(PLAIN, weights=Less))
    install(with_chosen(port, {NAME: "plain"}))
    with tpuport.load("toy", cache_dir=tmp_path) as session:
        for refuse in (session.components.check_files, session.components.load):
            with pytest.raises(WeightsError, match=r"the toy of its .*: to_out\.bias"):
                refuse(NAME)


def test_upstreams_own_backend_is_refused(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    install(chosen(toy))
    with (
        tpuport.load("toy", cache_dir=tmp_path) as session,
        pytest.raises(UsageError, match="'plain' is not upstream's, which denoise"),
    ):
        session.generate(**ASKED, backend="diffusers")


def test_op_by_op_too(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    install(chosen(toy))
    compiled, _ = run("dp=1", tmp_path)
    ours, _ = run("dp=1", tmp_path, no_jit=("denoise",))
    difference = float((ours.latents - compiled.latents).abs().max())
    assert difference <= TOLERANCES["component float32"]


# --- what is recorded


def test_another_implementation_is_another_program(
    toy: ModelPort, install: Callable[[ModelPort], None], tmp_path: Path
) -> None:
    keys = {}
    for port in (offering(toy), chosen(toy)):
        install(port)
        with tpuport.load("toy", cache_dir=tmp_path) as session:
            for name in (NAME, "vae"):
                key = session_fields(session.components, "denoise", name)
                keys[choices(port)[NAME], name] = key
            record = session.stage_record(
                StageReport(stage="denoise", backend="", unit="", total_seconds=0)
            )
            assert record["implementations"] == choices(port)
    before, after = keys["torchax", NAME], keys["plain", NAME]
    assert before["options"] | {"implementation": "plain"} == after["options"]
    assert "flax" in after["versions"]
    assert "flax" not in before["versions"]
    # What it has nothing to do with is not compiled again, but for the source: this
    # file is no part of the toy's package.
    before, after = keys["torchax", "vae"], keys["plain", "vae"]
    assert before | {"source": after["source"]} == after
