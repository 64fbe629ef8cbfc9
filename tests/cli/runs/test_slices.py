"""Slices compared by what a video takes and costs on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tpuport.cli.runs.slices import Comparison, Offer, deadline_of, prices, topologies
from tpuport.core.files.run_record import STAGES
from tpuport.errors import UsageError

ASKED = topologies("v5e-8, v6e-8,v5p-8,v6e-8")


def offer(
    number: int, seconds: float | None, price: float | None, **more: Any
) -> Offer:
    plan: Any = SimpleNamespace(**{"seconds": seconds, "fits": True} | more)
    return Offer(topology=ASKED[number], plan=plan, videos=2, price=price)


def test_a_slice_costs_its_chips_for_the_time_of_a_video() -> None:
    assert [one.name for one in ASKED] == ["v5e-8", "v6e-8", "v5p-8"]
    one = offer(1, 144.0, 2.5)
    assert one.seconds == 72.0
    assert one.cost == pytest.approx(2.5 * 8 * 72 / 3600)
    # The number of a v5p slice counts TensorCores, two a chip.
    assert offer(2, 144.0, 2.5).cost == pytest.approx(2.5 * 4 * 72 / 3600)
    assert offer(1, 144.0, None).cost is None
    assert offer(1, 144.0, 2.5, fits=False).cost is None
    assert offer(1, None, 2.5).seconds is None


def names(found: Comparison) -> tuple[str | None, str | None]:
    told = found.as_dict()
    return told["fastest"], told["cheapest"]


def test_the_cheapest_is_one_that_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offer, "as_dict", lambda self: {})
    slow, fast = offer(0, 200.0, 1.0), offer(1, 100.0, 2.7)
    for deadline, expected in (
        (math.inf, ("v6e-8", "v5e-8")),
        (100.0, ("v6e-8", "v5e-8")),
        (99.0, ("v6e-8", "v6e-8")),
        (49.0, (None, None)),
    ):
        assert names(Comparison([slow, fast], deadline, ["denoise"])) == expected
    assert names(Comparison([offer(0, 9.0, None)], math.inf, [])) == ("v5e-8", None)


@pytest.mark.parametrize(
    ("stages", "said"),
    [(STAGES, "no slice makes a video within"), (["denoise"], "no slice does denoise")],
)
def test_what_is_not_in_time_is_what_is_planned(
    stages: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offer, "row", lambda self: [""] * 6)
    found = Comparison([offer(0, 200.0, None)], 9.0, stages).text(verbose=False)
    assert found.splitlines()[-1].startswith(said)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["v6e"], "give a chip and what it costs for an hour, such as v6e=2.70"),
        (["v6e=free"], "give a chip"),
        (["v6e=-1"], "give a chip"),
        (["v6e=nan"], "give a chip"),
        (["v6=2"], "unknown TPU chip 'v6'"),
        (["v4=2"], "--topology names no slice of v4"),
        (["v6e=2", "v6e=3"], "--price v6e=3: v6e costs 2 too; give one price"),
        (["v6e=2,v5e=1"], "--price: v5p-8 has no price; add --price v5p=1.20"),
    ],
)
def test_prices_that_are_none_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prices(texts, ASKED)


def test_prices_and_times_are_read() -> None:
    given = prices(["v6e=2.70", " v5e = 1.2 ,v5p=4"], ASKED)
    assert given == {"v6e": 2.7, "v5e": 1.2, "v5p": 4.0}
    assert prices([], ASKED) == {}
    assert [deadline_of(t) for t in (None, "60s", "1.5m")] == [math.inf, 60.0, 90.0]
    for text in ("60", "0s", "soon", "-1s", "infs"):
        with pytest.raises(UsageError, match="is no time such as 60s or 2m"):
            deadline_of(text)
