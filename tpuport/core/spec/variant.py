"""One published checkpoint as data: its default video, its rules and its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: What every model calls a checkpoint of no published size.
CUSTOM = "custom"

Configs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By variant or form, by component."""


def read_configs(module: str) -> Configs:
    """The configs in the JSON file beside a module's file."""
    found: Configs = json.loads(Path(module).with_suffix(".json").read_text("utf-8"))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One published checkpoint, as data.

    Attributes:
        name: what ``--variant`` takes.
        title: for people.
        repo_id: the hub id of the published weights; empty for the built-in demo.
        height, width, num_frames, fps: the default shape of a video.
        num_inference_steps, guidance_scale: defaults.
        dtype: of the published weights as run on a TPU.
        frames: the rule for frame counts.
        sizes: the rule for heights and widths.
        options: defaults of the model's own options.
        configs: the config of each component, for checks without weights.
        notes: caveats shown by ``tpuport models``.
        tasks: what it can do: ``"t2v"``, ``"i2v"`` (from an image), ``"v2v"`` (from a
            video).
        form: which of the model's forms it is a checkpoint of.
        resolutions: the size classes it knows, by name, as what ``bucket`` takes; the
            first one is the default.
        strength: default share of the steps that video to video runs.
    """

    name: str
    title: str
    repo_id: str
    height: int
    width: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    dtype: str
    frames: FrameRule
    sizes: SizeRule
    options: Mapping[str, Any] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: str = ""
    tasks: tuple[str, ...] = ("t2v",)
    form: str = ""
    resolutions: Mapping[str, int] = field(default_factory=dict)
    strength: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameRule:
    """Legal frame counts: ``step * n + 1``, up to ``limit``."""

    step: int
    limit: int | None = None

    def allows(self, frames: int) -> bool:
        """Whether ``frames`` is on the rule."""
        return (
            frames >= 1
            and (frames - 1) % self.step == 0
            and (self.limit is None or frames <= self.limit)
        )

    def nearest(self, frames: int) -> tuple[int, ...]:
        """The one or two legal counts closest to ``frames``, ascending."""
        below = max((frames - 1) // self.step, 0) * self.step + 1
        choices = [below, below + self.step]
        if self.limit is not None:
            top = (self.limit - 1) // self.step * self.step + 1
            choices = [min(c, top) for c in choices]
        return tuple(sorted(set(choices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRule:
    """Legal heights and widths: multiples of ``multiple``, up to ``limit`` pixels."""

    multiple: int
    limit: int | None = None

    def allows(self, pixels: int) -> bool:
        """Whether one side is on the rule."""
        return (
            pixels >= self.multiple
            and pixels % self.multiple == 0
            and (self.limit is None or pixels <= self.limit)
        )

    def nearest(self, pixels: int) -> tuple[int, ...]:
        """The one or two legal sides closest to ``pixels``, ascending."""
        below = pixels // self.multiple * self.multiple
        choices = [max(below, self.multiple), below + self.multiple]
        if self.limit is not None:
            top = self.limit // self.multiple * self.multiple
            choices = [min(c, top) for c in choices]
        return tuple(sorted(set(choices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A setting that only this model has, given as ``--option name=value``."""

    name: str
    help: str
    parse: Callable[[Any], Any]
    choices: tuple[Any, ...] = ()
