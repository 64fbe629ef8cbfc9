"""Step caching: most denoising steps in the middle reuse what full steps computed.

Off unless asked for, and then it changes the video. ``deepcache`` keeps the state
before the last block and runs that block again; ``taylorseer`` keeps the features after
the last block of a few full steps and extrapolates them. Which steps are full is fixed
before the run, so a run has two programs and no decision on the device. A plugin
declares nothing but its :class:`~tpuport.core.tracing.forward_split.ForwardSplit`.

Sources: DeepCache, arXiv 2312.00858, here as ports of video transformers have it;
TaylorSeer, arXiv 2503.06923, on the output of the last block alone (diffusers 0.42
``TaylorSeerCacheConfig`` has a mode of that kind, ``use_lite_mode``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpuport.core.tracing.forward_split import Where
from tpuport.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

METHODS: Mapping[str, Where] = {"deepcache": "before_last", "taylorseer": "after_last"}
"""Where each method takes the forward's state."""

#: Highest order of an extrapolation; docs/step-caching.md says what it amplifies.
MAX_ORDER = 4

#: Full steps at the start and from the end on, of 50; other schedules in proportion.
START, END, OF = 11, 45, 50

_EXAMPLE = 'write for example "deepcache" or "taylorseer:start=11,end=45,interval=4"'


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache:
    """Which steps are cached, and from what.

    Attributes:
        method: a key of :data:`METHODS`.
        start: the last of the full steps at the beginning, counted from 0; ``None`` for
            11 of 50 in proportion to the steps.
        end: the first of the full steps at the end; ``None`` for 45 of 50.
        interval: from start to end, every so many-th step is full.
        order: of the extrapolation, ``taylorseer`` only; ``None`` is 1 there.

    Raises:
        UsageError: an unknown method, or a value that is wrong for any number of steps.
    """

    method: str
    start: int | None = None
    end: int | None = None
    interval: int = 4
    order: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            hint = did_you_mean(self.method, METHODS, "")
            raise UsageError(
                f"step cache {self.method!r} is unknown; choose one of "
                f"{', '.join(METHODS)}, none{hint and '; '}{hint}"
            )
        if self.method == "taylorseer":
            if self.order is None:
                object.__setattr__(self, "order", 1)
            self._check("order", 1, MAX_ORDER)
        elif self.order is not None:
            raise UsageError(
                f"{self.method} has no order; it is a setting of taylorseer"
            )
        self._check("interval", 2, None)
        self._check("start", self._first_start, None)
        self._check("end", (self.start or self._first_start) + 2, None)

    @classmethod
    def parse(cls, value: StepCache | str | None) -> StepCache | None:
        """The cache that a value from a user or a file stands for.

        Accepts a cache, ``None``, ``"none"``, a method, or a method and settings:
        ``"deepcache:start=11,end=45,interval=4"``. ``str(cache)`` reads back as itself.

        Raises:
            UsageError: what is wrong, the legal values and the nearest of them.
        """
        if value is None or isinstance(value, StepCache):
            return value
        if not isinstance(value, str):
            raise UsageError(f"step cache {value!r} is not a string; {_EXAMPLE}")
        method, colon, rest = (part.strip() for part in value.partition(":"))
        if method == "none" and not colon:
            return None
        if method not in METHODS:
            # By name first, whatever its settings are.
            cls(method=method)
        names = ["start", "end", "interval"]
        names += ["order"] if method == "taylorseer" else []
        found: dict[str, int] = {}
        for item in rest.split(",") if colon else ():
            name, equals, text = (part.strip() for part in item.partition("="))
            if not equals or name not in names:
                raise UsageError(
                    f"step cache {value!r}: {item.strip()!r} is not a setting of "
                    f"{method}; it has {', '.join(names)}; "
                    + did_you_mean(name, names, _EXAMPLE)
                )
            if name in found:
                raise UsageError(f"step cache {value!r}: {name} is given twice")
            try:
                found[name] = int(text)
            except ValueError:
                raise UsageError(
                    f"step cache {value!r}: {name} {text!r} is not a whole number; "
                    + _EXAMPLE
                ) from None
        return cls(method=method, **found)

    def __str__(self) -> str:
        names = ("start", "end", "interval", "order")
        given = [(name, getattr(self, name)) for name in names]
        return f"{self.method}:" + ",".join(
            f"{name}={value}" for name, value in given if value is not None
        )

    @property
    def where(self) -> Where:
        """Where in the forward the state is taken and put back."""
        return METHODS[self.method]

    @property
    def depth(self) -> int:
        """How many states are kept."""
        return 1 + (self.order or 0)

    @property
    def _first_start(self) -> int:
        """The first start: before it there are too few full steps for the order."""
        return max(1, self.order or 0)

    def resolve(self, steps: int) -> StepCache:
        """This cache with start and end for a run of ``steps``.

        Raises:
            UsageError: start or end is out of range for so many steps, or there are too
                few steps to cache any.
        """
        least = self._first_start + 2
        if steps < least:
            raise UsageError(
                f"{self} would cache none of {steps} steps; it needs at least {least} "
                "steps, or --cache none"
            )
        # Rounded to the nearest step; 50 steps give 11 and 45.
        start, end = ((part * steps + OF // 2) // OF for part in (START, END))
        latest = (steps if self.end is None else min(self.end, steps)) - 2
        start = min(max(start, self._first_start), latest)
        if self.start is not None:
            self._check("start", self._first_start, latest, steps)
            start = self.start
        if self.end is not None:
            self._check("end", start + 2, steps, steps)
            end = self.end
        end = min(max(end, start + 2), steps)
        return replace(self, start=start, end=end)

    def schedule(self, steps: int) -> tuple[bool, ...]:
        """Whether each step is full.

        Steps before ``start`` and from ``end`` on are, and in between those with
        ``(step - start) % interval == 0``: 11, 45, 4 of 50 make 25 full steps (0-10,
        11, 15, ..., 43, 45-49) and 25 cached ones.

        Raises:
            UsageError: see :meth:`resolve`.
        """
        cache = self.resolve(steps)
        assert cache.start is not None
        assert cache.end is not None
        start, end = cache.start, cache.end
        return tuple(
            not start <= step < end or (step - start) % self.interval == 0
            for step in range(steps)
        )

    def weights_at(self, step: int, nodes: Sequence[int]) -> np.ndarray:
        """The prediction of a cached step as weights of the states kept.

        The polynomial in the step index through the full steps of ``nodes`` (Newton's
        divided differences, in Lagrange's form) is evaluated at the cached step. The
        prediction is exact for features that are such a polynomial, however the full
        steps are spaced. Order 1 is TaylorSeer's formula. From order 2 on TaylorSeer
        puts backward differences in place of derivatives in a Taylor series, which
        misses a polynomial of its own order.

        Args:
            nodes: the full steps whose states are kept, the newest first.

        Returns:
            Float32 [depth].
        """
        import numpy as np

        row = np.zeros(len(nodes), np.float32)
        for m, node in enumerate(nodes):
            others = [other for other in nodes if other != node]
            row[m] = np.prod([(step - o) / (node - o) for o in others])
        return row

    def _check(
        self, name: str, least: int, most: int | None, steps: int | None = None
    ) -> None:
        value = getattr(self, name)
        if value is None or (value >= least and (most is None or value <= most)):
            return
        nearest = least if most is None else min(max(value, least), most)
        legal = f"at least {least}" if most is None else f"{least} to {most}"
        of = "" if steps is None else f" of {steps} steps"
        raise UsageError(
            f"{self.method}: {name}={value}{of} asked for; it must be {legal}; nearest "
            f"valid: {nearest}"
        )
