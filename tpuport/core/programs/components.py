"""The components of a checkpoint on one mesh: checked, sharded, streamed, freed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.arrays import array_dtype, jax_dtype, to_numpy, torch_dtype
from tpuport.core.enums import Dtype
from tpuport.core.layers.attention import check_implementation
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.mesh.device_memory import array_bytes
from tpuport.core.reports import Reporter
from tpuport.core.spec.choices import (
    attention_of,
    chosen_of,
    dtype_of,
    implementation_of,
)
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.tracing.runtime import Runtime
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.gathering import gathered, room_for_weights, undivided
from tpuport.core.weights.jax_module import JaxModule, WeightMap
from tpuport.core.weights.placement import abstract_weights, place_weights
from tpuport.core.weights.sharding import GATHERED, ShardingPlan, WeightInfo
from tpuport.core.weights.skeleton import build_skeleton, is_used, match_names
from tpuport.core.weights.transforms import transformer
from tpuport.errors import UsageError, WeightsError, damaged
from tpuport.kernels.attention.choice import AttentionChoice

_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of stored weights, as safetensors spells them."""

EVERYTHING = (".*",)
"""A regex of every weight's name."""


@dataclass
class Loaded:
    """A component with its weights on the devices.

    Attributes:
        ported: the module; upstream's, or of the implementation in place.
        weights: by the names in ``ported.arrays``: arrays, or ``ShapeDtypeStruct`` with
            shardings; see :meth:`Components.abstract`.
        plan: where they go.
        replicated: the sharding of everything that is not a weight.
    """

    ported: PortedModule | JaxModule
    weights: dict[str, Any]
    plan: ShardingPlan
    replicated: jax.sharding.NamedSharding


class Components:
    """The components of ``checkpoint`` as ported modules on ``mesh``.

    Args:
        port: the model.
        checkpoint: its files.
        mesh: the devices.
        settings: the dtype of the weights, which is known, the attention and the
            layout of the sharding rules.
        reporter: told what is loaded.
        skeletons: modules without weights by component, which are slow to build;
            another object of this checkpoint may have them.
    """

    def __init__(
        self,
        port: ModelPort,
        checkpoint: Checkpoint,
        mesh: jax.sharding.Mesh,
        settings: RunSettings,
        *,
        reporter: Reporter | None = None,
        skeletons: dict[str, torch.nn.Module] | None = None,
    ) -> None:
        # An unknown layout is refused before anything is read.
        port.rules(next(iter(port.components)), settings.sharding)
        assert settings.dtype is not None
        self.port = port
        self.checkpoint = checkpoint
        self.mesh = mesh
        self.dtype = settings.dtype
        self._reporter = reporter or Reporter()
        attention = check_implementation(settings.attention, self.platform)
        self.settings = replace(settings, attention=attention)
        self._runtimes: dict[tuple[bool, AttentionChoice, bool], Runtime] = {}
        self._maps: dict[str, WeightMap] = {}
        self.skeletons = {} if skeletons is None else skeletons
        self._loaded: dict[tuple[str, tuple[str, ...]], Loaded] = {}

    @property
    def platform(self) -> str:
        """Where programs run: ``"cpu"``, ``"tpu"`` or ``"gpu"``."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The names of the components whose weights are on the devices."""
        return tuple(dict.fromkeys(name for name, _ in self._loaded))

    def skeleton(self, name: str) -> torch.nn.Module:
        """The upstream module of a component, without weights."""
        if name not in self.skeletons:
            component = self.port.components[name]
            self.checkpoint.check_class(name, component.class_path)
            self.skeletons[name] = build_skeleton(
                component, self.checkpoint.config(name)
            )
        return self.skeletons[name]

    def dtype_of(self, name: str) -> str:
        """The dtype of a component's weights."""
        return dtype_of(self.port, name, self.dtype)

    def runtime(self, name: str) -> Runtime:
        """The tracing environment of a component."""
        # Float32 weights mean float32 products, on chips whose matrix units would
        # otherwise round their inputs to bfloat16.
        exact = self.dtype_of(name) == Dtype.FLOAT32
        attention = attention_of(self.port, name, self.settings.attention)
        # Upstream's code is patched; another implementation runs none of it.
        patched = implementation_of(self.port, name) is None
        key = (exact, attention, patched)
        if key not in self._runtimes:
            self._runtimes[key] = model_runtime(
                mesh=self.mesh,
                platform=self.platform,
                patches=self.port.patches if patched else (),
                overrides=self.port.overrides if patched else (),
                attention=self.port.attention,
                attention_implementation=attention,
                matmul_precision="highest" if exact else None,
            )
        return self._runtimes[key]

    def weight_map(self, name: str) -> WeightMap | None:
        """The weights of the implementation in place; ``None`` for upstream's class.

        Raises:
            UsageError: it cannot run the component's config.
        """
        implementation = implementation_of(self.port, name)
        if implementation is None:
            return None
        if name not in self._maps:
            config = self.checkpoint.config(name)
            try:
                self._maps[name] = implementation.weights(config)
            except NotImplementedError as error:
                chosen = chosen_of(self.port, name)
                raise UsageError(
                    f"{name} {chosen!r} cannot run {self.checkpoint.source}: {error}"
                ) from error
        return self._maps[name]

    def plan(self, name: str) -> ShardingPlan:
        """Where the weights of a component go; reads names and shapes only.

        Raises:
            ShardingError: rules and weights disagree.
        """
        ported = self._upstream(name)
        tensors = ported.module.state_dict(keep_vars=True)
        itemsize = torch_dtype(self.dtype_of(name)).itemsize
        weights = {
            stored: WeightInfo(tuple(tensors[stored].shape), itemsize)
            for stored in ported.names.stored
        }
        layout, mesh = self.settings.sharding, dict(self.mesh.shape)
        plan = self.port.sharding_plan(name, layout, weights, mesh)
        stacked = self.port.components[name].stacked
        if stacked and self.mesh.size > 1:
            ported = PortedModule(ported.module, ported.runtime, stacked)
            plan = gathered(plan, ported, weights, room=self._room(name))
        return plan

    def _room(self, name: str) -> float:
        """Bytes of a device that the weights of a component may take.

        Denoisers come first, and the other components get the rest: a session may keep
        all of them on the devices, and a plan must hold for any session.
        """
        room = room_for_weights(self.mesh.devices.flat)
        if math.isinf(room) or name in self.port.denoisers:
            return room
        return room - sum(self.plan(n).bytes_per_device for n in self.port.denoisers)

    def abstract(self, name: str, used: tuple[str, ...] = EVERYTHING) -> Loaded:
        """What :meth:`load` gives, with shapes and shardings in place of arrays.

        Reads configs only: the checkpoint needs no weight files.

        Args:
            name: of the component.
            used: regexes of the weights to place; all of them when not given.

        Raises:
            ShardingError: rules and weights disagree.
        """
        runtime, plan = self.runtime(name), self.plan(name)
        floating = jax_dtype(self.dtype_of(name))
        replicated = NamedSharding(self.mesh, PartitionSpec())
        wanted = functools.partial(is_used, used)
        weight_map = self.weight_map(name)
        if weight_map is not None:
            module = JaxModule(weight_map, runtime)
            structs = module.abstract_weights(plan, self.mesh, floating, wanted)
            return Loaded(module, structs, plan, replicated)
        stacked = self.port.components[name].stacked
        ported = PortedModule(self.skeleton(name), runtime, stacked)
        computed = set(ported.names.computed)

        def dtype(weight: str, tensor: torch.Tensor) -> Any:
            cast = tensor.is_floating_point() and weight not in computed
            return floating if cast else array_dtype(tensor)

        weights = abstract_weights(ported, plan, self.mesh, dtype, wanted)
        return Loaded(ported, weights, plan, replicated)

    def load(self, name: str, used: tuple[str, ...] = EVERYTHING) -> Loaded:
        """The component with its weights placed; read from disk once until released.

        Tensors stream from the files to their shards one at a time, so the host never
        holds the component whole.

        Args:
            name: of the component.
            used: regexes of the weights to place; all of them when not given.

        Raises:
            WeightsError: the files do not fit the config.
            ShardingError: rules and weights disagree.
        """
        if (name, used) in self._loaded:
            return self._loaded[name, used]
        self._reporter.loading(name)
        wanted = self.abstract(name, used)
        module, plan = wanted.ported, wanted.plan
        ported = self._upstream(name) if isinstance(module, JaxModule) else module
        files, found = self._match(name, ported)
        if plan.layout == GATHERED and not plan.held and ported.stacks:
            self._reporter.say(f"sharding {GATHERED}: nothing of {name} is divided")
        stacked = self.port.components[name].stacked
        if stacked and (whole := undivided(plan, room=self._room(name))):
            self._reporter.say(whole)
        if plan.extra_bytes_per_device:
            gigabytes = plan.extra_bytes_per_device / 2**30
            self._reporter.say(
                f"sharding {plan.layout}: {name} takes {gigabytes:.2f} GiB per device "
                "more than by default"
            )
        tensors = ported.tensors()
        by_file = {v: k for k, v in found.items() if is_used(used, k)}
        dtype = torch_dtype(self.dtype_of(name))
        transform = transformer(
            self.port.components[name].transforms,
            getattr(self.skeleton(name), "config", {}),
            ported.names.stored,
        )

        def stream() -> Iterator[tuple[str, np.ndarray]]:
            for stored, tensor in self.checkpoint.stream(files, list(by_file)):
                target = by_file[stored]
                if tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                yield target, to_numpy(transform(target, tensor))

        streamed: Iterable[tuple[str, np.ndarray]]
        if isinstance(module, JaxModule):
            streamed = itertools.starmap(module.map.convert, stream())
        else:
            computed = ((n, to_numpy(tensors[n])) for n in ported.names.computed)
            streamed = itertools.chain(stream(), computed)
        wanted.weights = place_weights(module, wanted.weights, streamed)
        self._loaded[name, used] = wanted
        return wanted

    def check_files(self, name: str) -> None:
        """Refuse a component whose files do not fit its config; reads no tensor.

        Raises:
            WeightsError: files, names or shapes are off.
            UsageError: the implementation in place cannot run the config.
        """
        ported = self._upstream(name)
        self._match(name, ported)
        weight_map = self.weight_map(name)
        if weight_map is not None:
            weight_map.check(ported.names.stored)

    def _upstream(self, name: str) -> PortedModule:
        """Upstream's class, whose tensors are those that files hold."""
        return PortedModule(self.skeleton(name), self.runtime(name))

    def _match(
        self, name: str, ported: PortedModule
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """File of every stored tensor, and the stored name of every weight.

        Raises:
            WeightsError: files, names or shapes are off.
        """
        files = self.checkpoint.weight_files(name)
        found = match_names(
            self.checkpoint.source,
            self.port.components[name],
            files,
            ported.names.tied,
            ported.names.stored,
        )
        expected = ported.module.state_dict(keep_vars=True)
        shapes = self.checkpoint.shapes(files)
        for weight, stored in found.items():
            (dtype, shape), tensor = shapes[stored], expected[weight]
            if shape != list(tensor.shape):
                raise damaged(
                    f"{self.checkpoint.source}: {name}/ holds {stored} of shape "
                    f"{tuple(shape)}; its config.json asks for {tuple(tensor.shape)}",
                    "the folder",
                )
            if tensor.is_floating_point() and dtype not in _FLOATS:
                raise WeightsError(
                    f"{self.checkpoint.source}: {name}/ holds {stored} as {dtype}, "
                    f"expected one of {', '.join(_FLOATS)}; quantised checkpoints are "
                    "not supported"
                )
        return files, found

    def held_bytes(self, stage: Sequence[str]) -> tuple[int, int]:
        """Bytes of a device that loaded weights take.

        Args:
            stage: names of components.

        Returns:
            of all others, and of these.
        """
        sizes = {False: 0, True: 0}
        for (name, _), loaded in self._loaded.items():
            sizes[name in stage] += array_bytes(loaded.weights.values())
        return sizes[False], sizes[True]

    def release(self, *names: str) -> None:
        """Free the weights of the named components, or of all."""
        for key in tuple(self._loaded):
            if not names or key[0] in names:
                for array in self._loaded.pop(key).weights.values():
                    array.delete()

    def close(self) -> None:
        """Free weights, modules and tracing environments."""
        self.release()
        self.skeletons.clear()
        self._maps.clear()
        self._runtimes.clear()
