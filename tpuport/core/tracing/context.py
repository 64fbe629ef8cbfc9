"""The surroundings of torch code while it is traced.

Patches on upstream modules run inside a program. Patches for native blocks need the
mesh, the platform and the torchax environment, which upstream's signatures do not
carry.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tpuport.kernels.attention.choice import AttentionChoice

if TYPE_CHECKING:
    import jax

    from tpuport.core.mesh.spatial_split import Border, Space


BATCH, HEADS, TOKENS = "dp", "tp", "sp"
"""The mesh axes that split the dims of q, k and v.

Heads and batch are split where the axis divides them. Queries are split at any length:
they are padded to the axis size and the padding is cut off again.
"""


@dataclass(frozen=True, slots=True)
class Active:
    """The environment and the context of the program that is being traced."""

    env: Any
    context: OpContext

    def arrays(self, tree: Any) -> Any:
        """JAX arrays in place of the tensors of a tree."""
        return self.env.t2j_iso(tree)

    def tensors(self, tree: Any) -> Any:
        """Tensors in place of the JAX arrays of a tree."""
        return self.env.j2t_iso(tree)

    def axis_size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 if the mesh has no such axis."""
        return self.context.axis_size(name)


_active: contextvars.ContextVar[Active | None] = contextvars.ContextVar(
    "tpuport_active", default=None
)


@contextlib.contextmanager
def activated(active: Active) -> Iterator[None]:
    """``current`` gives ``active`` in this block."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def tracing_now() -> bool:
    """Whether a program is being traced."""
    return _active.get() is not None


def current() -> Active:
    """The program that is being traced.

    Raises:
        RuntimeError: no program is being traced.
    """
    active = _active.get()
    if active is None:
        raise RuntimeError(
            "this code runs only while tpuport traces a program; outside of one, "
            "upstream's own code is in place"
        )
    return active


@dataclass(frozen=True, kw_only=True, slots=True)
class OpContext:
    """What an implementation may depend on.

    Attributes:
        mesh: the device mesh the traced program runs on.
        platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``: where it will be lowered.
        implementation: the attention asked for.
        chip: the TPU the program is for, such as ``"v6e"``; ``None`` for others.
        space: how the picture is split over devices, or ``None``; in a split program
            arrays are a device's own and there is no mesh.
        records: each traced attention call appends how it runs.
        convolutions: each traced convolution appends how it runs.
        padded: arrays that were made by padding a picture, by their id.
    """

    mesh: jax.sharding.Mesh | None
    platform: str
    implementation: AttentionChoice = AttentionChoice()
    chip: str | None = None
    space: Space | None = None
    records: list[AttentionRecord]
    convolutions: list[ConvolutionRecord] = field(default_factory=list)
    padded: dict[int, Padded] = field(default_factory=dict)

    def axis_size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 if the mesh has no such axis."""
        if name is None or self.mesh is None:
            return 1
        return int(dict(self.mesh.shape).get(name, 1))

    def axis(self, name: str | None, *counts: int) -> str | None:
        """The mesh axis if it has several devices and divides all ``counts``."""
        size = self.axis_size(name)
        return name if size > 1 and all(n % size == 0 for n in counts) else None

    def note(
        self, implementation: str, reason: str = "", *, call: str = "convolution"
    ) -> None:
        self.convolutions.append(
            ConvolutionRecord(call=call, implementation=implementation, reason=reason)
        )

    def tried(self, call: str, instead: str, run: Callable[[], Any]) -> Any:
        """What ``run`` makes; ``None`` if a kernel refuses: ``instead`` takes over.

        The refusal is noted in the kernel's own words. What the attempt noted is
        forgotten: what it traced is no part of the program.
        """
        known = len(self.convolutions)
        try:
            return run()
        except NotImplementedError as error:
            del self.convolutions[known:]
            self.note(instead, str(error), call=call)
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """An array that is another one with a border around its picture.

    Attributes:
        array: with the border.
        source: without.
        before, after: rows and columns of the border.
        border: what the border is.
    """

    array: jax.Array
    source: jax.Array
    before: tuple[int, int]
    after: tuple[int, int]
    border: Border


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRecord:
    """How one traced attention call runs.

    Attributes:
        query: shape [B, H, Lq, D], without the padding of a split.
        key: shape [B, Hkv, Lk, D].
        implementation: the kernel that was chosen.
        reason: why, and why other kernels were passed over.
        split: mesh axis per dim of the query, ``None`` if whole.
        key_lengths: whether each batch item has its own number of valid keys.
        frame_tokens: of frame-causal attention; the kernel then runs once per frame
            and the split of Lq is one of the tokens of each frame.
        blocks: tokens per step of the implementation, by option name.
        window: (left, right) of a local window, ``None`` without one.
        k_smooth: whether the mean key was subtracted.
        causal: whether query i sees keys 0..i only.
        dtype: of q, k and v.
        padded: tokens of the joint sequence with its padding; ``None`` without one.
        ulysses: devices that exchange tokens for heads.
        ring: devices that share heads, each with a part of the queries.
        ring_keys: how these devices exchange keys, ``"passed"`` round a ring or
            ``"gathered"``; ``None`` for one device.
        notice: why the user's choice did not run, or empty.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    implementation: str
    reason: str
    split: tuple[str | None, ...]
    key_lengths: bool = False
    frame_tokens: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    window: tuple[int, int] | None = None
    k_smooth: bool = False
    causal: bool = False
    dtype: str = "float32"
    padded: int | None = None
    ulysses: int = 1
    ring: int = 1
    ring_keys: str | None = None
    notice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionRecord:
    """How some traced calls run.

    Attributes:
        call: kind of call, such as ``"convolution"``. A block of convolutions is noted
            only if it was refused as a whole; each convolution then has a note of its
            own.
        implementation: what computes the calls.
        reason: why a better implementation was passed over, or empty.
        count: number of calls as traced: a call in a scanned block counts once.
    """

    call: str
    implementation: str
    reason: str = ""
    count: int = 1


def counted(records: Iterable[ConvolutionRecord]) -> tuple[ConvolutionRecord, ...]:
    """One record for all calls of a kind with one implementation and reason."""
    counts: Counter[ConvolutionRecord] = Counter()
    for record in records:
        counts[replace(record, count=1)] += record.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())
