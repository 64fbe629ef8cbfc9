"""One module's forward as programs: what upstream's code may do around it."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.utils.torch_utils import lru_cache_unless_export

import tpuport
from tpuport.core.mesh.compiler_flags import GATHERS, ChosenFlags
from tpuport.core.reports import Reporter
from tpuport.core.seam.entry import MOST_CONSTANTS, Entry
from tpuport.core.seam.ported import seam_of
from tpuport.core.weights.gathering import SMALLEST
from tpuport.errors import TpuportError, UsageError


def entry_of(ported: torch.nn.Module) -> Entry:
    (entry,) = seam_of(ported).entries.values()
    return entry


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def close(found: Any, expected: Any) -> bool:
    return bool(torch.allclose(found, expected, rtol=0, atol=1e-6))


class Table:
    """A plain object that keeps what was made first, as some rotary embedders do."""

    kept: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(4, device=x.device) / 3
        return self.kept


class WithTable(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table(x)


def test_a_plain_object_keeps_no_tensor_of_a_trace() -> None:
    module = WithTable()
    ported = tpuport.port(module)
    for rows in (3, 2):
        assert close(ported(X[:rows]), module(X[:rows]))
    assert ported.table.kept is None


class Collecting(Linear):
    """Adds a hook when first called, as transformers does for hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        collected: list[torch.Tensor] = []
        self.__dict__["collected"] = collected
        if not getattr(self, "_output_capturing_hooks_installed", False):
            self.inner.register_forward_hook(
                lambda _module, _args, out: self.collected.append(out)
            )
            self._output_capturing_hooks_installed = True
        self.inner(x)
        del self.__dict__["collected"]
        return sum(collected) * len(collected)


def test_a_hook_that_forward_adds_is_added_once() -> None:
    module = Collecting()
    ported = tpuport.port(module)
    for x in (X, X[:2], X):
        assert close(ported(x), module(x))
    assert len(entry_of(ported).programs) == 2


def test_the_module_that_was_handed_in_stays_upstreams() -> None:
    module = Linear()
    ported = tpuport.port(module)
    assert type(ported) is Linear
    assert "forward" not in vars(module)
    assert ported.inner.weight is module.inner.weight


class Keeps(torch.nn.Module):
    """Sets attributes, and changes in place what attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.sums = {"all": torch.zeros(3, 4)}
        self.total = torch.zeros(3, 4)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.kept[-1:]
        self.kept.append(x)
        self.sums["all"] = self.sums["all"] + x
        self.total.add_(x)
        before, self.last = 0 if self.last is None else self.last, x * 2
        return self.total + self.sums["all"] * len(self.kept) + self.kept[0] + before


def test_attributes_may_change() -> None:
    module, ported = Keeps(), tpuport.port(Keeps())
    for number in range(4):
        assert close(ported(X + number), module(X + number))
    assert close(ported.kept[0], module.kept[0])
    assert close(ported.total, module.total)
    assert close(ported.last, module.last)


class Reads(Linear):
    """Reads what says how to run, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(twice=False)
        self.after = torch.nn.SiLU()
        self.nested = {"by": {"factor": 1.0}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(super().forward(x)) * self.nested["by"]["factor"]
        return x * 2 if self.config.twice else x


def with_a_layer(module: Any) -> None:
    torch.manual_seed(1)
    module.after = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())


@torch.no_grad()
def with_other_weights(module: Any) -> None:
    module.inner.weight.mul_(2)


#: Changes, and how many programs there are then: other weights need other programs.
READ: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a plain attribute": (lambda m: setattr(m, "factor", 3.0), 2),
    "a child of another class": (lambda m: setattr(m, "after", torch.nn.ReLU()), 2),
    "a child with weights": (with_a_layer, 1),
    "weights in place": (with_other_weights, 1),
    "a plain object": (lambda m: setattr(m.config, "twice", True), 2),
    "a dict in a dict": (lambda m: m.nested["by"].update(factor=3.0), 2),
}


@pytest.mark.parametrize("what", READ)
def test_what_forward_reads_is_part_of_the_key(what: str) -> None:
    module, (change, programs) = Reads(), READ[what]
    ported, before = tpuport.port(copy.deepcopy(module)), module(X)
    assert close(ported(X), before)
    for one in (module, ported):
        change(one)
    assert close(ported(X), module(X))
    assert not close(ported(X), before)
    assert len(entry_of(ported).programs) == programs


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(size=x.shape, device=x.device)


def test_numbers_are_drawn_again_at_every_call_by_a_program_of_each_shape() -> None:
    ported = tpuport.port(Draws())
    for count in (3, 2, 3, 2):
        torch.manual_seed(count)
        expected = Draws()(X[:count])
        torch.manual_seed(count)
        assert close(ported(X[:count]), expected)
    assert len(entry_of(ported).programs) == 2


class Seeded(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return x + torch.randn(x.shape, generator=generator)


def test_a_program_may_be_traced_in_inference_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).eval()
    expected = module(X).detach()
    ported = tpuport.port(module)
    masked = tpuport.port(Masked())
    mask = torch.tensor([1, 0, 1])
    with torch.inference_mode():
        assert close(ported(X), expected)
        assert close(masked(X, mask, torch.tensor(2)), X[mask.bool()] * 2)


class Gathers(torch.nn.Module):
    """Takes and returns mappings."""

    def forward(self, given: OrderedDict[str, torch.Tensor]) -> Any:
        return OrderedDict((name, x * 2) for name, x in given.items())


def test_a_mapping_keeps_its_class() -> None:
    ported = tpuport.port(Gathers())
    found = ported(OrderedDict(a=X, b=X + 1))
    assert type(found) is OrderedDict
    assert close(found["a"], X * 2)
    assert close(found["b"], X * 2 + 2)


class Masked(torch.nn.Module):
    """Reads the values of a mask while it runs."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, step: torch.Tensor
    ) -> torch.Tensor:
        return x[mask.bool()] * step if bool(mask.any()) else x * 0


def test_a_mask_that_is_read_becomes_a_constant() -> None:
    told: list[str] = []
    reporter = Reporter()
    reporter.say = told.append  # type: ignore[method-assign]
    module, ported = Masked(), tpuport.port(Masked(), reporter=reporter)
    for mask in ([1, 0, 1], [0, 1, 1], [0, 0, 0]):
        one = torch.tensor(mask)
        assert close(ported(X, one, torch.tensor(2)), module(X, one, torch.tensor(2)))
    assert len(entry_of(ported).programs) == 3
    (line,) = told
    assert f"{MOST_CONSTANTS} at most" in line


def test_masks_without_end_are_refused() -> None:
    ported = tpuport.port(Masked())

    def ask() -> Iterator[None]:
        for number in range(1, MOST_CONSTANTS + 2):
            mask = torch.tensor([int(bit) for bit in f"{number:06b}"])
            ported(X.repeat(2, 1), mask, torch.tensor(1))
            yield

    with pytest.raises(TpuportError, match="on_host"):
        list(ask())


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("module", "given", "error", "told"),
    [
        (Branching(), (X,), TpuportError, r"Branching.*test_entry\.py:.*on_host"),
        (Seeded(), (X,), TpuportError, "a generator that forward makes"),
        (Gathers(), (deque([X]),), TpuportError, "a deque with tensors"),
        (torch.nn.Identity(), (torch.tensor([2**40]),), UsageError, "32 bits"),
        (Linear(), (X, 2), TypeError, r"Linear\.forward: too many positional"),
        (Linear(), (), TypeError, "missing a required argument: 'x'"),
    ],
)
def test_what_no_program_takes_is_refused_by_name(
    module: Any, given: tuple[Any, ...], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        tpuport.port(module, progress=False)(*given)


class Caching(torch.nn.Module):
    """Hands state over by changing what it is given, as Wan's decoder does."""

    def forward(
        self, x: torch.Tensor, cache: list[Any], place: list[int]
    ) -> torch.Tensor:
        before = cache[place[0]]
        cache[place[0]] = "first" if before is None else x + 1
        place[0] += 1
        return x if isinstance(before, str | None) else x + before


def test_lists_that_forward_changes_are_changed() -> None:
    caches: list[list[Any]] = []
    for module in (Caching(), tpuport.port(Caching())):
        cache: list[Any] = [None, None]
        place = [0]
        for call in range(6):
            out = module(X + call, cache, place)
            assert place == [1]
            place[0] = 0
        caches.append([out, *cache])
    assert close(caches[0][0], caches[1][0])
    assert close(caches[0][1], caches[1][1])
    assert caches[0][2] is caches[1][2] is None


class LayerCache:
    key: torch.Tensor | None

    def __init__(self) -> None:
        self.key = None


class Cache:
    """Keeps keys, as upstream's caches do: a plain object that begins empty."""

    def __init__(self) -> None:
        self.layers = [LayerCache() for _ in range(2)]


class Filling(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        for layer in cache.layers:
            x = x + (0 if layer.key is None else layer.key)
            layer.key = 2 * x
        return x


def test_an_object_that_forward_fills_is_filled() -> None:
    module, x = Filling(), torch.arange(3.0)
    wanted, found = Cache(), Cache()
    ported = tpuport.port(module)
    for _ in range(3):
        assert torch.equal(ported(x, found), module(x, wanted))
        for one, other in zip(found.layers, wanted.layers, strict=True):
            assert one.key is not None
            assert other.key is not None
            assert torch.equal(one.key, other.key)


class Keeping(torch.nn.Module):
    """Keeps a table by its size; reads a value the second time it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(4.0))

    @lru_cache_unless_export()
    def table(self, size: int) -> torch.Tensor:
        return self.numbers[:size] * 2.0

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        x = x + self.table(x.shape[0])
        return x * number[0].tolist()


def test_a_table_that_a_function_keeps_is_of_one_trace() -> None:
    module, x, number = Keeping(), torch.ones(3), torch.tensor([3])
    ported = tpuport.port(module)
    assert torch.equal(ported(x, number), torch.tensor([3.0, 9.0, 15.0]))
    assert torch.equal(module(x, number), torch.tensor([3.0, 9.0, 15.0]))


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


def test_a_tensor_that_forward_writes_to_is_written_to() -> None:
    mine, theirs = X.clone(), X.clone()
    assert close(tpuport.port(InPlace())(mine), InPlace()(theirs))
    assert close(mine, theirs)


class Counting(torch.nn.Module):
    """Whole numbers of all widths."""

    def __init__(self) -> None:
        super().__init__()
        levels = torch.tensor([2, 3], dtype=torch.int32)
        self.register_buffer("levels", levels, persistent=False)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> dict[str, torch.Tensor]:
        kinds = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
        places = x.argsort(dim=-1)
        found = {str(kind): places.to(kind) for kind in kinds}
        flat = found["torch.int32"].flatten()
        return found | {
            "levels": self.levels * 2,
            "like": torch.zeros_like(given) + given,
            "narrow": flat // 2,
            "sum": flat.sum(),
            "places": places.to(given.dtype) + places,
            "mask": x > 0,
            "x": x,
        }


@pytest.mark.parametrize("given", [torch.int32, torch.int64, torch.uint8])
def test_whole_numbers_have_upstreams_dtype(given: torch.dtype) -> None:
    module, numbers = Counting(), torch.arange(4).to(given)
    found, expected = tpuport.port(module)(X, numbers), module(X, numbers)
    assert {k: v.dtype for k, v in found.items()} == {
        k: v.dtype for k, v in expected.items()
    }
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_constant_input_is_uploaded_once() -> None:
    ported = tpuport.port(Linear())
    seam = seam_of(ported)
    text = torch.ones(3, 4)
    ported(text)
    known = seam.arithmetic.devices._known[text]
    ported(text)
    assert seam.arithmetic.devices._known[text] is known
    text.add_(1)
    assert close(ported(text), ported(torch.full((3, 4), 2.0)))


class Stepped(torch.nn.Module):
    """A denoiser of alike blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        blocks = (torch.nn.Linear(width, width) for _ in range(4))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * timestep


def test_programs_take_the_compilers_flags_of_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A denoiser's flags make convolutions compile four times longer."""
    asked: list[tuple[str, ...]] = []

    def flags_for(device: Any, *stages: str) -> ChosenFlags:
        asked.append(stages)
        return ChosenFlags()

    monkeypatch.setattr("tpuport.core.seam.devices.flags_for", flags_for)
    x, timestep = torch.ones(2, 8), torch.ones(1)

    tpuport.port(torch.nn.Linear(8, 8), mesh="sp=2")(x) + 1
    assert {*asked} == {("decode",)}
    asked.clear()
    tpuport.port(Stepped(), mesh="sp=2")(x, timestep) + 1
    assert {*asked} == {("denoise",)}
    asked.clear()
    # In parts, which the sparse cores gather: no small weight is.
    monkeypatch.setattr(
        "tpuport.core.seam.module_weights.room_for_weights", lambda devices: 1
    )
    width = math.isqrt(SMALLEST)
    tpuport.port(Stepped(width), mesh="sp=2")(torch.ones(2, width), timestep) + 1
    assert {*asked} == {("denoise", GATHERS)}
