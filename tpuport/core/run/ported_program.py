"""A bare torch module as a compiled JAX program on torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils import _pytree as torch_pytree

from tpuport.core.arrays import array_dtype, to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.spec.component import Component
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.tracing.block_stacks import StackError
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.gathering import gathered, room_for_weights
from tpuport.core.weights.placement import abstract_weights, place_weights
from tpuport.core.weights.sharding import DEFAULT_LAYOUT, ShardingPlan
from tpuport.core.weights.transforms import transformer
from tpuport.errors import UsageError
from tpuport.kernels.attention.choice import AttentionChoice


class PortedProgram:
    """A torch module compiled for a mesh. Made by :func:`tpuport.port`.

    The module's weights are copied to the devices when this object is made; later
    changes of the module are not seen. Every new combination of shapes, dtypes and
    non-tensor arguments compiles once.

    Attributes:
        plan: where the weights went.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        port: ModelPort,
        component: Component,
        mesh: jax.sharding.Mesh,
        *,
        attention: AttentionChoice = AttentionChoice(),
        sharding: str = DEFAULT_LAYOUT,
        stack: bool = True,
    ) -> None:
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        floats = {t.dtype for t in tensors.values() if t.is_floating_point()}

        self._runtime = model_runtime(
            mesh=mesh,
            platform=str(mesh.devices.flat[0].platform),
            patches=port.patches,
            overrides=port.overrides,
            attention=port.attention,
            attention_implementation=attention,
            matmul_precision="highest" if torch.float32 in floats else None,
        )
        stacked = component.stacked if stack else ()
        self._ported = PortedModule(module, self._runtime, stacked)
        names = self._ported.names
        key = next(k for k, c in port.components.items() if c is component)
        stored = {name: tensors[name] for name in names.stored}
        whole = port.sharding_plan(key, sharding, stored, dict(mesh.shape))
        room = room_for_weights(mesh.devices.flat)
        self.plan: ShardingPlan = gathered(whole, self._ported, stored, room=room)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        wanted = abstract_weights(
            self._ported, self.plan, mesh, lambda name, tensor: array_dtype(tensor)
        )
        names_wanted = (*names.stored, *names.computed)
        config = getattr(module, "config", {})
        transform = transformer(component.transforms, config, names.stored)
        self._weights = place_weights(
            self._ported,
            wanted,
            (
                (name, to_numpy(transform(name, tensors[name].detach())))
                for name in names_wanted
            ),
        )
        self._programs: dict[Any, tuple[Any, dict[str, Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's ``forward``; see :meth:`call`."""
        return self.call("forward", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Upstream's own methods (an autoencoder's decode), not torch's (to, train).
        module = self.__dict__["_ported"].module if "_ported" in self.__dict__ else None
        if name in ("config", "dtype"):
            return getattr(module, name)
        method = getattr(type(module), name, None)
        if callable(method) and not hasattr(torch.nn.Module, name):
            return functools.partial(self.call, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def close(self) -> torch.nn.Module:
        """Give back the devices' memory, and upstream's module.

        Raises:
            UsageError: that happened before.
        """
        self._check_open()
        self._weights = {}
        self._programs.clear()
        return self._ported.module

    def _check_open(self) -> None:
        if not self._weights:
            name = type(self._ported.module).__name__
            raise UsageError(f"this {name} is not ported any more; port it again")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module as a compiled program.

        Args:
            method: such as ``"forward"`` or, for an autoencoder, ``"decode"``.
            args: as upstream's method takes them: torch tensors become inputs, anything
                else is compiled in.
            kwargs: the same.

        Returns:
            What upstream's method returns, with torch tensors on the host.

        Raises:
            UsageError: the module has no such method, it takes no tensors, it returns
                an object that holds tensors out of reach, or it would draw random
                numbers.
        """
        self._check_open()
        if not callable(getattr(self._ported.module, method, None)):
            raise UsageError(
                f"{type(self._ported.module).__name__} has no method {method!r}"
            )
        leaves, tree = torch_pytree.tree_flatten((args, kwargs))
        if kwargs.get("sample_posterior") or any(
            isinstance(leaf, torch.Generator) for leaf in leaves
        ):
            raise UsageError(
                f"{method} with random draws: they would be drawn once, when the "
                "program is traced. Call .encode(x), and sample its distribution"
            )
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if not any(is_tensor):
            raise UsageError(
                f"{method} takes no tensors, so there is no program of it; call it on "
                "the module before tpuport.port()"
            )
        dynamic = [
            jax.device_put(to_numpy(leaf), self._replicated)
            for leaf, tensor in zip(leaves, is_tensor, strict=True)
            if tensor
        ]
        static = tuple(
            None if tensor else leaf
            for leaf, tensor in zip(leaves, is_tensor, strict=True)
        )
        key = (method, str(tree), is_tensor, repr(static))
        if key not in self._programs:
            self._programs[key] = self._make(method, tree, is_tensor, static)
        program, found = self._programs[key]
        try:
            out = program(self._weights, dynamic)
        except StackError as error:
            name = type(self._ported.module).__name__
            raise UsageError(f"{name}.{method}: {error}") from error
        results = [
            constant if i is None else _rebuilt(to_torch(out[i]), constant)
            for i, constant in found["leaves"]
        ]
        return torch_pytree.tree_unflatten(results, found["tree"])

    def _make(
        self,
        method: str,
        tree: Any,
        is_tensor: tuple[bool, ...],
        static: tuple[Any, ...],
    ) -> tuple[Any, dict[str, Any]]:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        found: dict[str, Any] = {}

        def program(weights: Mapping[str, Any], dynamic: list[Any]) -> list[Any]:
            inputs = iter(dynamic)
            leaves = [
                next(inputs) if tensor else leaf
                for leaf, tensor in zip(static, is_tensor, strict=True)
            ]
            args, kwargs = torch_pytree.tree_unflatten(leaves, tree)
            out = self._ported.apply(weights, *args, method=method, **kwargs)
            out_leaves, found["tree"] = torch_pytree.tree_flatten(out)
            arrays: list[Any] = []
            found["leaves"] = []
            for leaf in out_leaves:
                if isinstance(leaf, jax.Array):
                    found["leaves"].append((len(arrays), None))
                    arrays.append(leaf)
                elif isinstance(leaf, DiagonalGaussianDistribution):
                    # Made again on the host, from what it was made from.
                    found["leaves"].append((len(arrays), type(leaf)))
                    arrays.append(self._runtime.env.t2j_iso(leaf.parameters))
                elif leaf is None or isinstance(leaf, bool | int | float | str):
                    found["leaves"].append((None, leaf))
                else:
                    raise UsageError(
                        f"{type(self._ported.module).__name__}.{method} returns a "
                        f"{type(leaf).__name__}, whose tensors cannot be reached; call "
                        "a method that returns tensors"
                    )
            return arrays

        program.__name__ = f"ported_{method}"
        return jax.jit(program, out_shardings=self._replicated), found


def _rebuilt(tensor: torch.Tensor, made_by: Any) -> Any:
    """A tensor, or the object that upstream makes from it."""
    return tensor if made_by is None else made_by(tensor)


def component_of(
    port: ModelPort, module: torch.nn.Module
) -> tuple[ModelPort, Component]:
    """The form and the component of ``port`` that ``module`` is an instance of.

    Raises:
        UsageError: it is of none; the message lists the classes.
    """
    classes: dict[str, tuple[ModelPort, Component]] = {}
    for form in port.all_forms:
        for component in form.components.values():
            name = component.class_path.partition(":")[2]
            classes.setdefault(name, (form, component))
    for cls in type(module).__mro__:
        if cls.__name__ in classes:
            return classes[cls.__name__]
    raise UsageError(
        f"model {port.name!r} has no component of class {type(module).__name__}; it "
        "has " + ", ".join(classes)
    )
