"""Flags of the TPU compiler per chip, in one table, and how they reach a program.

Each program is compiled with the flags for the devices of its mesh
(``compiler_options`` of ``jax.jit``). So ``generate``, ``plan`` and ``compile`` use
equal flags, and no variable has to be set before the TPU is started. A flag that the
user has set in ``LIBTPU_INIT_ARGS`` or ``XLA_FLAGS`` is left to the user.

A flag is in the table if it makes a step of a model here faster, by a published
measurement or by what the compiler says of the step. docs/log has the flags that were
tried and left out, with figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core import compat
from tpuport.core.mesh.chips import chip_of
from tpuport.errors import UsageError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True, slots=True)
class LibtpuFlag:
    """One flag for some chips.

    Attributes:
        name: without dashes, such as ``"xla_tpu_scoped_vmem_limit_kib"``.
        value: as text.
        chips: those it is set for, keys of :data:`tpuport.core.mesh.chips.CHIPS`.
        stages: whose programs it is for; :data:`GATHERS` for those that gather weights.
        effect: what it does for a step, with figures.
        source: who sets it for such programs, and the command that gave the figures.
    """

    name: str
    value: str
    chips: tuple[str, ...]
    stages: tuple[str, ...]
    effect: str
    source: str

    @property
    def text(self) -> str:
        """As in ``LIBTPU_INIT_ARGS``."""
        return f"--{self.name}={self.value}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_DENOISE = ("denoise",)
#: Programs whose weights are held in parts, in a pipeline without a plugin.
GATHERS = "gathers"


def _vmem(kib: int, chips: tuple[str, ...], effect: str) -> LibtpuFlag:
    """How much of a core's VMEM an operation may take."""
    return LibtpuFlag(
        name="xla_tpu_scoped_vmem_limit_kib",
        value=str(kib),
        chips=chips,
        stages=_DENOISE,
        effect=f"an operation may take {kib >> 10} {effect}; predicted",
        source=(
            "set, higher, by MaxText benchmarks/xla_flags_library.py, maxdiffusion "
            "README.md and tpu-recipes inference/; figures and commands in "
            "docs/performance.md"
        ),
    )


FLAGS: tuple[LibtpuFlag, ...] = (
    LibtpuFlag(
        name="xla_tpu_enable_async_all_to_all",
        value="true",
        chips=("v5e", "v5p", "v6e", "v7x"),
        stages=_DENOISE,
        effect=(
            "the exchange of heads for tokens around attention runs beside other work: "
            "a 5-billion-parameter model's step at 720p takes 3.6 % less on v5e-8, "
            "4.1 % on v5p-8, 4.6 % on v6e-8 and v7x-8; predicted"
        ),
        source=(
            "set by maxdiffusion README.md, chunked Ulysses attention, and by "
            "tpu-recipes training/ironwood and training/v5p; figures and commands in "
            "docs/performance.md"
        ),
    ),
    LibtpuFlag(
        name="xla_tpu_enable_sparse_core_collective_offload_all_gather",
        value="true",
        chips=("v6e",),
        stages=(GATHERS,),
        effect=(
            "weights that are held in parts are gathered by the sparse cores, beside "
            "other work: a guided step of a 14-billion-parameter model at 720p takes "
            "3.4 % less on v6e-8; predicted"
        ),
        source=(
            "set by jax's own tests of overlap on TPUs and, with more flags of its "
            "kind, for Mixtral by MaxText, maxtext_trillium_model_configs.py; figures "
            "and commands in docs/log/2026-11-24-any-pipeline.md"
        ),
    ),
    _vmem(
        32768,
        ("v5e", "v5p"),
        "MiB of the core's VMEM, not 16: the same step takes a further 1.6 % less on "
        "v5e-8, 3.2 % on v5p-8",
    ),
    _vmem(
        57344,
        ("v6e",),
        "of the core's 128 MiB of VMEM, not 32: the same step takes a further 2.5 % "
        "less",
    ),
    _vmem(
        49152,
        ("v7x",),
        "of the core's 64 MiB of VMEM, not 32: the same step takes a further 2.4 % "
        "less",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenFlags:
    """What programs for one chip are compiled with.

    Attributes:
        chip: the name of it; ``None`` for devices without a row in the table.
        applied: set by tpuport.
        overridden: rows that the user has set differently, each with the user's text.
    """

    chip: str | None = None
    applied: tuple[LibtpuFlag, ...] = ()
    overridden: tuple[tuple[LibtpuFlag, str], ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """Name -> value, as jax takes ``compiler_options``."""
        return {flag.name: flag.value for flag in self.applied}

    @property
    def texts(self) -> tuple[str, ...]:
        """The applied ones as flags."""
        return tuple(flag.text for flag in self.applied)

    def remarks(self) -> list[str]:
        """A line for every flag that the user has set."""
        return [
            f"compiler flag {yours} is yours; tpuport's own {flag.text} is left out"
            for flag, yours in self.overridden
        ]


def choose_flags(chip: str, given: Sequence[str] = (), *stages: str) -> ChosenFlags:
    """The flags for a chip, beside those that the user has given.

    Args:
        chip: the name of it, such as ``"v6e"``.
        given: flags in force for the process, such as ``"--xla_a=1"``.
        stages: whose programs; everybody's where none is given.
    """
    # ``--noxla_a`` is one of ``xla_a``.
    names = (text.lstrip("-").partition("=")[0].removeprefix("no") for text in given)
    yours = dict(zip(names, given, strict=True))
    rows = [
        flag
        for flag in FLAGS
        if chip in flag.chips and (not stages or set(stages) & set(flag.stages))
    ]
    return ChosenFlags(
        chip=chip,
        applied=tuple(flag for flag in rows if flag.name not in yours),
        overridden=tuple((f, yours[f.name]) for f in rows if f.name in yours),
    )


def flags_for(device: jax.Device, *stages: str) -> ChosenFlags:
    """The flags for programs on such a device: none off the TPU, or without rows.

    Args:
        device: one of the mesh.
        stages: as :func:`choose_flags` takes them.

    Raises:
        TpuportError: this jax does not tell what flags are in force.
    """
    try:
        chip = chip_of(device)
    except UsageError:  # no TPU, or newer than the table; its programs run all the same
        return ChosenFlags()
    return choose_flags(chip, compat.compiler_flags(), *stages)
