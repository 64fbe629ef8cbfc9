"""A module's weights: which stacks they form, where they go, and when they changed."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from tpuport.core.arrays import to_numpy
from tpuport.core.enums import WeightsOn
from tpuport.core.mesh.device_mesh import axes_within
from tpuport.core.mesh.mesh_use import undivided
from tpuport.core.reports import bytes_text
from tpuport.core.seam.arithmetic import Arithmetic
from tpuport.core.seam.blocks import alike_blocks, usable_stacks
from tpuport.core.seam.module_state import ModuleTree
from tpuport.core.seam.target import Claim, Target
from tpuport.core.spec.model_plugin import Layout, rules_of
from tpuport.core.tracing.block_stacks import Stack
from tpuport.core.tracing.patching import Status
from tpuport.core.tracing.ported_module import PortedModule, WeightNames
from tpuport.core.tracing.runtime import Runtime
from tpuport.core.weights.file_parts import Index
from tpuport.core.weights.gathering import (
    gathered,
    room_for_weights,
    usable_memory,
)
from tpuport.core.weights.placement import abstract_weights
from tpuport.core.weights.sharding import (
    ShardingPlan,
    UndividedError,
    plan_sharding,
)
from tpuport.core.weights.stored_tensors import stored_in
from tpuport.core.weights.streaming import streamable, streaming
from tpuport.core.weights.transforms import transformer
from tpuport.errors import ShardingError, UsageError

#: Bytes of weights that every device may hold of a component that upstream calls once
#: a video. To bring more to every device takes longer than to gather it there.
MOST_WHOLE = 1 << 30
#: Bytes of the least table of an embedding of such a component whose features are
#: split. A lookup moves the rows of a few tokens, never the table.
LEAST_TABLE = 1 << 28
#: Parameters of forward that tell a denoiser, which upstream calls each step.
_TIMES = frozenset({"timestep", "timesteps"})


def is_denoiser(module: torch.nn.Module) -> bool:
    """Whether upstream calls a module each step: its forward takes a time step."""
    return not _TIMES.isdisjoint(inspect.signature(type(module).forward).parameters)


class ModuleWeights:
    """The weights of one module, for programs that run it.

    Args:
        module: upstream's.
        name: for messages.
        arithmetic: on results; of the port.
        make_room: called before weights are placed; other entries may have to go.

    Attributes:
        target: what its programs are made for.
        plan: where the weights go, once that is known.
        waiting: the weights that may wait on the host -> bytes of each on a device.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        arithmetic: Arithmetic,
        make_room: Callable[[Any], None],
    ) -> None:
        self.name = name
        self.module = module
        self._arithmetic, self._make_room = arithmetic, make_room
        self._devices, self._journal = arithmetic.devices, arithmetic.journal
        self.target = self._asked = _target_of(name, self._devices.target)
        self.plan: ShardingPlan | None = None
        self.waiting: Mapping[str, int] = {}
        self._tree = ModuleTree(module)
        self._tensors: tuple[Any, ...] = ()
        self._kinds: tuple[Any, ...] = ()
        self._weights: Mapping[str, jax.Array] | None = None
        self._blocks: tuple[Stack, ...] | None = None
        self._ported: PortedModule | None = None
        self._claim: Claim | None = None
        self._structs: Mapping[str, Any] = {}
        self._each_step = is_denoiser(module)
        component = name.partition(".")[0]
        #: Whether ``auto`` is the host, because a program was refused for its size.
        self._too_large_on_chip = component in self.target.streamed

    @property
    def patches(self) -> tuple[Status, ...]:
        """What became of each patch while the last program was traced."""
        return () if self._ported is None else self._ported.runtime.patch_states

    @property
    def bytes_per_device(self) -> int:
        """Bytes of weights that each device holds."""
        self._port()
        assert self.plan is not None
        return self.plan.bytes_per_device

    @property
    def placed(self) -> bool:
        return self._weights is not None

    @property
    def inside(self) -> list[torch.nn.Module]:
        return self._tree.modules()[1:]

    def free(self) -> None:
        """Give back the devices' memory; the next call places the weights again."""
        try:
            self.settle()
        finally:
            self._weights = None

    def _port(self) -> PortedModule:
        if self._ported is None:
            self._claim = self._claimed()
            stacked: tuple[Stack, ...] = ()
            # In space none: a kernel in a scan copies its pictures in and out.
            if not self.target.splits_space(self.name):
                tied = WeightNames.of(self.module).tied
                stacked = usable_stacks(alike_blocks(self.module), tied)
            self._rebuild(stacked)
        assert self._ported is not None
        return self._ported

    def _claimed(self) -> Claim | None:
        """What the plugin knows of this module; other modules run without."""
        self.target = self._asked
        claim, other = fitting(self.name, self.module, self.target)
        if other:
            assert self.target.general is not None
            plugin = self.target.claims[self.name].plugin
            self.target = self.target.general
            self._journal.reporter.say(
                f"{self.name} has other {other} than the plugin of {plugin} knows: it "
                "runs as any module, without the plugin"
            )
        return claim

    def _runtime(self) -> Runtime:
        module = self.module
        floats = {t.dtype for t in (*module.parameters(), *module.buffers())}
        halves = {torch.bfloat16, torch.float16}
        return self.target.runtime(self.name, exact=not floats & halves)

    def _rebuild(self, blocks: tuple[Stack, ...]) -> None:
        """Take ``blocks`` as the stacks; programs with other stacks are gone."""
        self._blocks = blocks
        self._forget()
        self._weights = None
        ported = PortedModule(self.module, self._runtime(), blocks)
        stored = ported.stored()
        mesh = self.target.mesh
        shape = dict(mesh.shape)
        if self._claim is None:
            rules = rules_of(self._tables(stored))
            whole = plan_sharding(rules, stored, shape, component=self.name)
        else:
            whole = self._claim.plan(stored, shape)
        room = room_for_weights(mesh.devices.flat)
        if self.target.splits_space(self.name):
            room = sys.maxsize  # each device computes with all of them
        elif self.target.in_parts:
            room = 0
        elif not self._each_step:
            room = min(room, MOST_WHOLE)
        within = axes_within(mesh)
        self.plan = gathered(whole, ported, stored, room=room, within=within)
        self.waiting = streamable(self.plan, ported, stored)
        if self._streams():
            self.plan = streaming(self.plan, self.waiting)
        self._structs = abstract_weights(ported, self.plan, mesh)
        self._ported = ported

    def _streams(self) -> bool:
        """Whether the weights of stacked blocks wait on the host."""
        asked, plan = self.target.weights_on, self.plan
        assert plan is not None
        if asked == WeightsOn.HOST:
            if not self.waiting and (self._each_step or self.target.alone):
                raise UsageError(
                    f"--weights-on host (weights_on=): {self.name} has no large blocks "
                    "that run under one scan, so nothing can stream; leave it out"
                )
            return bool(self.waiting)
        if asked == WeightsOn.CHIP or not self.waiting:
            return False
        limit = usable_memory(self.target.mesh.devices.flat)
        if not self._too_large_on_chip and plan.bytes_per_device <= limit:
            return False
        size = bytes_text(sum(self.waiting.values()))
        self._journal.notice(
            f"{self.name} does not fit a chip: {size} of its blocks' weights wait in "
            "the host's memory and stream (--weights-on host says so at once)"
        )
        return True

    def _tables(self, stored: Container[str]) -> Layout:
        """A layout of large tables of embeddings, by features."""
        mesh = self.target.mesh
        axes = tuple(axis for axis in axes_within(mesh) if axis in ("dp", "sp"))
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if not axes or self._each_step or self.target.splits_space(self.name):
            return {}
        return {
            re.escape(f"{name}.weight"): (None, axes)
            for name, module in self.module.named_modules()
            if isinstance(module, torch.nn.Embedding)
            and f"{name}.weight" in stored
            and module.weight.nbytes >= LEAST_TABLE
            and module.embedding_dim % parts == 0
        }

    def _placed(self) -> Mapping[str, jax.Array]:
        if self._weights is not None:
            return self._weights
        self._make_room(self)
        self._journal.reporter.loading(self.name)
        ported = self._port()
        tensors = ported.tensors()
        transforms = () if self._claim is None else self._claim.transforms
        config = getattr(self.module, "config", {})
        part = transformer(transforms, config, ported.names.stored)

        def read(name: str, index: Index) -> np.ndarray:
            return to_numpy(part(name, tensors[name].detach(), index))

        stored = [one for one in stored_in(tensors.values()) if one.host is None]
        before = sum(one.bytes_read for one in stored)
        ahead = any(one.in_store for one in stored)
        given = ported, self._structs, read
        self._weights = self._devices.weights(*given, ahead=ahead)
        taken = sum(one.bytes_read for one in stored) - before
        whole = sum(one.bytes_stored for one in stored)
        if taken < whole:
            self._journal.reporter.say(
                f"{self.name}: this process read {bytes_text(taken)} of "
                f"{bytes_text(whole)} of its weights, what its devices hold"
            )
        return self._weights

    def _refresh(self) -> None:
        """Take over what changed in the module's tensors since the last call."""
        modules = self._tree.modules()
        now = (self._tree.assigned, *_identities(modules))
        if now == self._tensors:
            return
        kinds = tuple(_kinds(self.module))
        if self._tensors:
            self.settle()
            self._weights = None
            if kinds != self._kinds:
                self._ported = None
                self._forget()
        self._tensors, self._kinds = now, kinds

    def settle(self) -> None:
        """Run what still needs the weights as they were."""
        raise NotImplementedError

    def _forget(self) -> None:
        """The weights have other shapes or stacks: no program fits them any more."""
        raise NotImplementedError


def fitting(
    name: str, module: torch.nn.Module, target: Target
) -> tuple[Claim | None, str]:
    """What a plugin knows of a module, or what the module has that no plugin knows.

    An adapter makes a module another one, and so does a processor of attention that is
    not upstream's: native blocks would pass either over.

    Raises:
        ShardingError: the pattern of the plugin's layout that fits no weight.
        MeshError: the axis that divides no heads or weights.
    """
    claim = target.claims.get(name)
    if claim is None:
        return None, ""
    adapted, config = _adapted(module), getattr(module, "config", {})
    if not claim.fits(config):
        return None, "settings in its config"
    if claim.whole and not _upstreams_attention(module):
        return None, "attention"
    if claim.whole and adapted:
        return None, "weights, of an adapter,"
    state, mesh = module.state_dict(keep_vars=True), dict(target.mesh.shape)
    try:
        claim.plan({key: state[key] for key in WeightNames.of(module).stored}, mesh)
    except ShardingError as error:
        if adapted:
            return None, "weights"
        if isinstance(error, UndividedError):
            heads = getattr(config, "num_attention_heads", None)
            raise undivided(name, mesh, error.split, heads) from None
        raise
    return claim, ""


def _target_of(name: str, target: Target) -> Target:
    """What programs of a module are made for.

    Native blocks are for a denoiser as a whole. A part that upstream's code calls by
    itself, because of a hook say, is called as upstream's.
    """
    claim = target.claims.get(name.partition(".")[0])
    if "." in name and claim and claim.whole:
        assert target.general is not None
        return target.general
    return target


def _adapted(module: torch.nn.Module) -> bool:
    """Whether some layers are an adapter's, in place of upstream's."""
    return any(hasattr(child, "base_layer") for child in module.modules())


def _upstreams_attention(module: torch.nn.Module) -> bool:
    """Whether all processors of attention are classes of diffusers."""
    processors = [getattr(child, "processor", None) for child in module.modules()]
    return all(
        type(one).__module__.partition(".")[0] == "diffusers"
        for one in processors
        if one is not None
    )


def _identities(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """What tells that a tensor of some modules changed; asked before every call."""
    for child in modules:
        for tensors in (child._parameters, child._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield id(tensor)
                    yield 0 if tensor.is_inference() else tensor._version
                    # Module.to() assigns to ``data``, which is no new version.
                    yield tensor.data_ptr()
        # Adapters that peft adds to ``data`` in place, which is no new version either.
        merged = vars(child).get("merged_adapters")
        if merged is not None:
            yield tuple(merged)
            if merged:
                yield tuple(vars(child).get("scaling", {}).items())


def _kinds(module: torch.nn.Module) -> Iterator[Any]:
    """Place, shape and dtype of each tensor of a module, and which adapters merged."""
    for number, child in enumerate(module.modules()):
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield number, name, tuple(tensor.shape), tensor.dtype
        if "merged_adapters" in vars(child):
            yield number, "merged_adapters"
