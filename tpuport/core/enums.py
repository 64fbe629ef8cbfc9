"""The words that a setting may be, each with a name: strings, so JSON has them too."""

from __future__ import annotations

from enum import StrEnum


class Word(StrEnum):
    """A string of a fixed list; it looks like a plain string in messages."""

    def __repr__(self) -> str:
        return repr(self.value)


class StageName(Word):
    """The stages in the order they run."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


DENOISERS = ("transformer", "unet", "denoiser", "prior")
"""How the names of components that denoise begin in all pipelines of diffusers."""


def denoises(name: str) -> bool:
    """Whether a component denoises, or the one that a path begins with."""
    component = name.partition(".")[0]
    return component.startswith(DENOISERS) and "encoder" not in component


class Dtype(Word):
    """Of weights.

    float16 has no exponent range for T5 and is no native type of a TPU: upstream's
    float16 checkpoints run in bfloat16 or float32.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Blocks(Word):
    """Blocks written for the chip, or upstream's own."""

    NATIVE = "native"
    UPSTREAM = "upstream"


class Backend(Word):
    """tpuport's programs, or plain upstream code."""

    TPUPORT = "tpuport"
    DIFFUSERS = "diffusers"


class Tiling(Word):
    """Whether decode runs in overlapping tiles; ``auto`` where it would not fit."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class WeightsOn(Word):
    """Where the weights of stacked blocks wait; ``auto`` is the host where needed."""

    AUTO = "auto"
    CHIP = "chip"
    HOST = "host"


class Place(Word):
    """Where the text encoder runs: on the mesh, or on the host's CPU."""

    DEVICE = "device"
    HOST = "host"
