"""Where torch code is traced into JAX: op overrides, patches and precision, scoped.

A runtime owns a private torchax environment. Overrides, patches and torch modes are
active only while :meth:`Runtime.tracing` is, so an open session never changes what
upstream code does outside its own programs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from tpuport.core import compat
from tpuport.core.mesh.chips import chip_of
from tpuport.core.mesh.spatial_split import Space
from tpuport.core.tracing.context import (
    Active,
    AttentionRecord,
    ConvolutionRecord,
    OpContext,
    activated,
)
from tpuport.core.tracing.op_overrides import OpOverride, installed, resolve_claims
from tpuport.core.tracing.patching import Patch, Status, applied
from tpuport.kernels.attention.choice import AttentionChoice


@dataclass(kw_only=True, eq=False)
class Runtime:
    """The tracing environment of one mesh.

    Attributes:
        mesh: devices the programs run on; ``None`` for the default device.
        platform: where programs are lowered.
        patches: monkey patches on upstream code, applied while tracing.
        overrides: op overrides.
        attention_implementation: the attention to use.
        matmul_precision: ``"highest"`` for exact float32 products on every chip.
        records: how the attention calls traced so far run.
        convolutions: how the convolutions of the program traced last run.
        patch_states: the state of each patch, after the first trace.
        space: how the picture is split in the traced program; see :meth:`split`.
    """

    mesh: jax.sharding.Mesh | None
    platform: str
    patches: Sequence[Patch] = ()
    overrides: Sequence[OpOverride] = ()
    attention_implementation: AttentionChoice = AttentionChoice()
    matmul_precision: str | None = None
    records: list[AttentionRecord] = field(default_factory=list)
    convolutions: list[ConvolutionRecord] = field(default_factory=list)
    patch_states: tuple[Status, ...] = ()
    space: Space | None = None

    def __post_init__(self) -> None:
        compat.import_torchax()
        from torchax.tensor import Environment

        self.env = Environment()
        self._claims = resolve_claims(self.overrides)

    def op_context(self) -> OpContext:
        """What op implementations of this runtime may depend on."""
        return OpContext(
            mesh=None if self.space else self.mesh,
            platform=self.platform,
            implementation=self.attention_implementation,
            chip=self._chip(),
            space=self.space,
            records=self.records,
            convolutions=self.convolutions,
        )

    @contextlib.contextmanager
    def split(self, space: Space) -> Iterator[None]:
        """Code traced in this context has a device's part of the picture."""
        before, self.space = self.space, space
        try:
            yield
        finally:
            self.space = before

    def _chip(self) -> str | None:
        """The kind of TPU that the programs are for, read from the mesh."""
        if self.platform != "tpu" or self.mesh is None:
            return None
        device = self.mesh.devices.flat[0]
        # A mesh of other devices stands in for TPUs if a program is only lowered.
        return chip_of(device) if device.platform == "tpu" else None

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Any]:
        """Torch code in this block runs on JAX; yields the torchax environment."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # torch's index tensors are int64, jax runs with 32-bit integers;
            # tpuport.core.arrays checks the indices that matter.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype.*64")
            self.patch_states = stack.enter_context(applied(self.patches))
            context = self.op_context()
            stack.enter_context(installed(self._claims, self.env, context))
            stack.enter_context(activated(Active(self.env, context)))
            if self.matmul_precision:
                stack.enter_context(jax.default_matmul_precision(self.matmul_precision))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.env)
            yield self.env
