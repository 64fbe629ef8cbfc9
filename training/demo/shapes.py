"""Moving shapes with captions, made by code: what the demo models learn.

A scene has one or two shapes of eight kinds and eight colours, each with a size and one
of eight motions, on one of four backgrounds. An English sentence says all of that. Some
combinations of shape, colour and motion are held out: training never sees them.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

FRAMES, SIDE = 17, 128
COLOURS = {
    "red": (215, 35, 40),
    "green": (35, 165, 60),
    "blue": (40, 75, 220),
    "yellow": (240, 220, 45),
    "orange": (245, 135, 25),
    "purple": (135, 55, 185),
    "pink": (250, 135, 190),
    "cyan": (45, 200, 220),
}
#: What the model does not know, and a LoRA teaches. The autoencoder can show it.
NEW_COLOURS = {"olive": (130, 140, 30)}
BACKGROUNDS = {
    "black": (12, 12, 12),
    "white": (245, 245, 245),
    "grey": (125, 125, 125),
    "brown": (95, 62, 38),
}
#: What a sentence calls a shape.
SHAPES = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "diamond": ("diamond", "rhombus"),
    "cross": ("cross", "plus"),
    "heart": ("heart",),
    "hexagon": ("hexagon",),
}
#: What a sentence says of a motion, in words of one meaning.
MOTIONS = {
    "left": ("moves left", "slides to the left", "drifts left", "glides to the left"),
    "right": (
        "moves right",
        "slides to the right",
        "drifts right",
        "glides to the right",
    ),
    "up": ("moves up", "rises", "floats up", "climbs upwards"),
    "down": ("moves down", "falls", "sinks", "drops downwards"),
    "circle": ("moves in a circle", "circles around", "orbits", "goes round and round"),
    "grow": ("grows", "gets bigger", "becomes larger", "expands"),
    "spin": ("spins", "rotates", "turns around itself", "twirls"),
    "bounce": (
        "bounces",
        "hops up and down",
        "jumps up and down",
        "bounces up and down",
    ),
}
#: Radius in pixels of each size, and the words for a size; the middle one has none.
SIZES = {"small": 17, "": 22, "large": 27}
_SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "": ("",),
    "large": ("large", "big"),
}
_GREY = ("grey", "gray")
_HELD_OUT = 10  # one of so many combinations


@dataclass(frozen=True)
class Moving:
    """One shape: its kind, colour, size and motion, all by name."""

    shape: str
    colour: str
    size: str
    motion: str

    @property
    def held_out(self) -> bool:
        """Whether training must not see this shape, colour and motion together."""
        text = f"{self.shape} {self.colour} {self.motion}"
        return zlib.crc32(text.encode()) % _HELD_OUT == 0


@dataclass(frozen=True)
class Scene:
    """What a video shows; ``seed`` places the shapes."""

    shapes: tuple[Moving, ...]
    background: str
    seed: int

    def moves_as(self, motions: Iterable[str]) -> bool:
        """Whether a shape has one of these motions."""
        return any(one.motion in motions for one in self.shapes)

    def caption(self, random: random.Random) -> str:
        """A sentence about the scene, its words chosen at random."""
        parts = []
        for one in self.shapes:
            size, shape = _SIZE_WORDS[one.size], SHAPES[one.shape]
            words = [random.choice(size), one.colour, random.choice(shape)]
            name = " ".join(word for word in words if word)
            article = "an" if name[0] in "aeiou" else "a"
            parts.append(f"{article} {name} {random.choice(MOTIONS[one.motion])}")
        text = " and ".join(parts)
        colour = random.choice(_GREY) if self.background == "grey" else self.background
        where = f"on a {colour} background"
        forms = (
            f"{text} {where}",
            f"{where}, {text}",
            f"{text}, {where}",
        )
        return random.choice(forms)

    def video(self) -> np.ndarray:
        """[FRAMES, SIDE, SIDE, 3], bytes."""
        placed = random.Random(self.seed)
        paths = [
            _Path.of(one, number, len(self.shapes), placed)
            for number, one in enumerate(self.shapes)
        ]
        return np.stack([self._frame(paths, t / (FRAMES - 1)) for t in range(FRAMES)])

    def _frame(self, paths: list[_Path], time: float) -> np.ndarray:
        zoom = 3
        picture = Image.new("RGB", (SIDE * zoom,) * 2, BACKGROUNDS[self.background])
        pen = ImageDraw.Draw(picture)
        for one, path in zip(self.shapes, paths, strict=True):
            x, y, radius, angle = path.at(time)
            corners = [
                (
                    zoom * (x + radius * (px * math.cos(angle) - py * math.sin(angle))),
                    zoom * (y + radius * (px * math.sin(angle) + py * math.cos(angle))),
                )
                for px, py in OUTLINES[one.shape]
            ]
            pen.polygon(corners, fill=(COLOURS | NEW_COLOURS)[one.colour])
        return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))


@dataclass(frozen=True)
class _Path:
    """Where a shape is over time: its middle, its reach, and its radius, in pixels."""

    motion: str
    x: float
    y: float
    reach: float
    radius: float

    @classmethod
    def of(cls, one: Moving, number: int, count: int, placed: random.Random) -> _Path:
        """Two shapes stand beside each other, and have half the width each."""
        alone = count == 1
        radius = SIZES[one.size] * (1 if alone else 0.75)
        reach = 30 if alone else 15
        middle = SIDE / 2
        x = middle if alone else SIDE * (0.27 if number == 0 else 0.73)
        loose = 10 if alone else 4
        return cls(
            motion=one.motion,
            x=x + placed.uniform(-loose, loose),
            y=middle + placed.uniform(-loose, loose) * (1 if alone else 3),
            reach=reach,
            radius=radius,
        )

    def at(self, time: float) -> tuple[float, float, float, float]:
        """Middle, radius, and angle at a time of 0 to 1."""
        x, y, radius, angle = self.x, self.y, self.radius, 0.0
        along = self.reach * (2 * time - 1)
        tall = 1.0 if self.reach > 20 else 1.6
        if self.motion == "left":
            x -= along
        elif self.motion == "right":
            x += along
        elif self.motion == "up":
            y -= tall * along
        elif self.motion == "down":
            y += tall * along
        elif self.motion == "circle":
            turn = 2 * math.pi * time
            x += 0.8 * self.reach * math.sin(turn)
            y -= 0.8 * self.reach * math.cos(turn)
        elif self.motion == "grow":
            radius *= 0.6 + 0.9 * time
        elif self.motion == "spin":
            angle = math.pi * time
        else:
            y += self.reach * (0.5 - abs(math.sin(2 * math.pi * time))) * tall
        return x, y, radius, angle


def _around(count: int, *radii: float) -> list[tuple[float, float]]:
    """Corners at equal angles from the top on, their radii in turn."""
    return [
        (
            radii[n % len(radii)] * math.sin(2 * math.pi * n / count),
            -radii[n % len(radii)] * math.cos(2 * math.pi * n / count),
        )
        for n in range(count)
    ]


def _heart() -> list[tuple[float, float]]:
    corners = []
    for n in range(48):
        t = 2 * math.pi * n / 48
        wave = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t)
        corners.append((math.sin(t) ** 3, -(wave - math.cos(4 * t)) / 16))
    return corners


_ARM = 0.36
#: Corners of each shape around its middle, within a circle of radius 1.
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "circle": _around(48, 0.95),
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": _around(3, 1.1),
    "star": _around(10, 1.15, 0.5),
    "diamond": [(0, -1.1), (0.7, 0), (0, 1.1), (-0.7, 0)],
    "cross": [
        (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM), (_ARM, 1),
        (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM), (-_ARM, -1),
    ],
    "heart": _heart(),
    "hexagon": _around(6, 1.0),
}  # fmt: skip


def scenes(
    seed: int,
    *,
    held_out: bool = False,
    two: float = 0.35,
    colours: Iterable[str] = COLOURS,
) -> Iterator[Scene]:
    """Scenes without end.

    Args:
        seed: of all that is drawn.
        held_out: scenes of one shape in a combination that training never sees; else
            scenes without any such combination.
        two: share of scenes with two shapes, of those for training.
        colours: of the shapes.
    """
    draw, colours = random.Random(seed), list(colours)
    while True:
        count = 1 if held_out or draw.random() >= two else 2
        chosen = draw.sample(colours, count)
        shapes = tuple(
            Moving(
                shape=draw.choice(list(SHAPES)),
                colour=colour,
                size=draw.choice(list(SIZES)),
                motion=draw.choice(list(MOTIONS)),
            )
            for colour in chosen
        )
        # A circle that spins looks still.
        if any(one.shape == "circle" and one.motion == "spin" for one in shapes):
            continue
        if any(one.held_out != held_out for one in shapes):
            continue
        background = draw.choice(list(BACKGROUNDS))
        yield Scene(shapes, background, seed=draw.getrandbits(32))
