"""Arithmetic on results of modules runs on the devices, with torch's meaning."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import diffusers
import jax
import pytest
import torch

import tpuport
from tpuport.core.seam import arithmetic, program_runs
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.ported import seam_of

Y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
S = torch.tensor(0.3, dtype=torch.float64)


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors here are small."""
    monkeypatch.setattr(program_runs, "FEWEST", 1)


@pytest.fixture(scope="module")
def same() -> Iterator[Any]:
    yield (ported := tpuport.port(Same(), mesh="sp=2"))
    tpuport.unport(ported)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of tensors that were copied to the host."""
    found: list[tuple[int, ...]] = []
    copied = DeviceTensor.copied

    def noted(self: DeviceTensor) -> torch.Tensor:
        found.append(tuple(self.shape))
        return copied(self)

    monkeypatch.setattr(DeviceTensor, "copied", noted)
    return found


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bytes may differ: XLA makes one rounding of a product and a sum."""
    same = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    unit = 1e-2 if expected.dtype in (torch.bfloat16, torch.float16) else 2e-6
    return same and bool(
        torch.allclose(found.double(), expected.double(), rtol=unit, atol=unit)
    )


EXPRESSIONS = """
x + 1 | 1 - x | 2.0 * x | x / 3 | 3 / x | x * S | S * x + Y | abs(x) ** 0.5 | x**2
-x | x * Y[0, 0] | Y - x | x.sub(Y, alpha=2) | torch.add(x, Y, alpha=0.3) | x.square()
x.clamp(-1, 1) | x.clamp(min=0.5) | torch.where(Y > 0.5, x, Y)
x.masked_fill(Y > 0, 2) | x > 0.5 | x == x | torch.lerp(x, Y, 0.7)
torch.addcmul(x, Y, Y, value=0.1) | x.float() | x.half() | x.to("cpu") | x.to(Y)
x.type_as(Y) | x.bfloat16() * 1.234 | x.bfloat16() * torch.tensor(2.5)
x.bfloat16() + Y | (x.bfloat16() > 0.3).float() | x.mean() | x.mean(1)
x.sum((0, 2), keepdim=True) | x.std(dim=[1, 2]) | x.var() | x.norm() | x.norm(1)
x.amax(1) | torch.linalg.norm(x) | torch.einsum("k,kbc->bc", torch.ones(2), x)
x.chunk(2)[1]
x.split([1, 3], 1)[1] | list(x)[1] | torch.stack([x, Y]) | torch.cat([x, Y]) | x[0]
x[:, 1:] | x[None] | x[..., 0] | x[:, ::2] | x[-1, :, -2] | x.expand(3, 2, 4, 6)
x.permute(2, 0, 1) * 2 | x.permute(2, 0, 1).reshape(-1) | x.flatten(1) | x.view(8, 6)
x.unflatten(1, (2, 2)) | x.transpose(0, 1) | x.movedim(0, 2) | x[:1].squeeze()
x.sum(0, dtype=torch.int64) | torch.sign(x / x.abs().clamp(min=1) * float("nan"))
x.std(0, correction=4) | (x.bfloat16() == S) | x.bfloat16() <= torch.tensor(0.3)
x.masked_fill(Y > 0, float("nan")).isnan() | torch.cat([x[:0].flatten(), x[:0, 0, 0]])
x.flip(0) | x.repeat(2, 1, 1) | x.roll(1, 0) | torch.nn.functional.pad(x, (0, 1))
x.clone()
""".replace("\n", "|")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "text", [t.strip() for t in EXPRESSIONS.split("|") if t.strip()]
)
def test_operators_are_torchs(
    text: str, inference: bool, same: Any, reads: list[Any]
) -> None:
    """The dtype, the shape and the order in memory too; nothing is read before."""
    with torch.inference_mode(inference):
        check_operator(text, same, reads)


def check_operator(text: str, same: Any, reads: list[Any]) -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = eval(text)
    x = same(x)
    found = eval(text)
    assert isinstance(found, DeviceTensor)
    assert found.stride() == expected.stride()
    assert not reads
    assert alike(found.on_host(), expected)
    assert found.on_host().stride() == expected.stride()


@pytest.mark.parametrize(
    "text",
    [
        *("x.quantile(0.5)", "x[:, [0, 2]]", "x.double() * 2", "x.argmax()"),
        *("x.tolist()", "x * 3000000000", "x.clamp(max=2**40)", "x < 2**33"),
        *("torch.where(x > 0, x, torch.full(x.shape, 2**40))", "x[:0].split(2)[0]"),
        "x.to(torch.float8_e4m3fn).float()",
    ],
)
def test_the_host_computes_the_rest(text: str, same: Any) -> None:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.as_tensor(eval(text))
    x = same(x)
    assert torch.equal(torch.as_tensor(eval(text)), expected)


WRITES = {
    "of a view": "v = x[0]; v.add_(1)",
    "seen in a view": "v = x[:, 1:]; w = v.permute(2, 0, 1); x.mul_(2)",
    "beside a view": "v, w = x.chunk(2); v.zero_(); u = w + 1",
    "of a view whose tensor is gone": "v, w = (x * 2).chunk(2); u = v[0]; u.fill_(3)",
    "of overlapping views": "y = x * 2; v, w = y[:, :3], y[:, 1:]; del y; v.mul_(3)",
    "seen in an expanded one": "v = x[:1].expand(3, 4, 6); x.add_(1)",
    "of an item": "x[:, 0] = 5.0; v = x * 2",
    "from a view of itself": "x[0].add_(x[1])",
    "after a read": "v = x[0]; float(x.sum()); float(x.quantile(0.5)); v.sub_(1)",
    "of a view made after a read": "x.numpy(); v = x[0]; v.mul_(2); w = x + 1",
    "after which more is computed": "y = x * 2; x.mul_(3); v = y + x",
    "of another dtype": "x.mul_(torch.tensor([2.0], dtype=torch.float64)); v = x + 1",
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_one_tensor_is_seen_in_its_views(
    name: str, same: Any
) -> None:
    def values(x: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"x": x}
        exec(WRITES[name], {"torch": torch}, found)
        return found

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    found, expected = values(same(x)), values(x.clone())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(found[key].numpy()), value), key


def test_a_view_of_the_host_is_uploaded_again_when_it_was_written_to(same: Any) -> None:
    x, y = same(torch.zeros(2, 4, 6)), torch.ones(6)
    v = y.expand_as(x)
    a = x + v
    y.add_(1)
    assert torch.equal((x + v).on_host(), torch.full((2, 4, 6), 2.0))
    assert torch.equal(a.on_host(), torch.ones(2, 4, 6))


def test_results_of_two_ports_meet(same: Any) -> None:
    other = tpuport.port(Same())
    x, y = same(torch.ones(2, 4, 6)), other(torch.ones(2, 4, 6))
    for _ in range(5):
        y = y + 1
    assert torch.equal((x * 1 + y).on_host(), torch.full((2, 4, 6), 7.0))


def test_what_cannot_be_written_is_refused_as_torch_refuses(same: Any) -> None:
    x = same(torch.ones(2, 4, 6))
    with pytest.raises(RuntimeError):
        (x * 1)[:1].expand(3, 4, 6).add_(1)
    with pytest.raises(RuntimeError):
        x.split([1, 1], 1)
    with torch.inference_mode():
        float(x.quantile(0.5))
    assert torch.equal(x.add_(1).cpu(), torch.full((2, 4, 6), 2.0))


def test_a_tensor_that_nobody_else_sees_is_written_on_the_devices(
    same: Any, reads: list[Any]
) -> None:
    x = same(Y)
    before = x + 0
    x *= 2
    x.add_(before)
    assert not reads
    assert alike(torch.as_tensor(x.numpy()), 3 * Y)


def programs(ported: Any) -> int:
    return len(seam_of(ported).arithmetic._programs)


SCHEDULERS = {
    "Euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    ),
    "DDIM": lambda: diffusers.CogVideoXDDIMScheduler(),
    "DPM": lambda: diffusers.DPMSolverMultistepScheduler(),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_of_a_scheduler_are_one_program(name: str, reads: list[Any]) -> None:
    """Guidance goes along; what changes from step to step is an input."""

    def sampled(module: Any) -> tuple[torch.Tensor, list[int]]:
        scheduler, x, counts = SCHEDULERS[name](), Y, []
        scheduler.set_timesteps(8)
        for number, time in enumerate(scheduler.timesteps):
            some, other = module(torch.cat([x, x]) * 0.3).chunk(2)
            noise = some + (3.0 + number) * (other - some)
            x = scheduler.step(noise, time, x, return_dict=False)[0]
            if isinstance(x, DeviceTensor):
                seam_of(module).arithmetic.step()
                counts.append(programs(module))
        return x, counts

    with torch.no_grad():
        expected, _ = sampled(Same())
        ported = tpuport.port(Same(), mesh="sp=2")
        found, counts = sampled(ported)
    assert not reads
    assert alike(found.on_host(), expected)
    assert counts[3] == counts[-3]
    tpuport.unport(ported)


def test_nothing_is_computed_or_kept_that_nobody_holds(
    same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before, count = len(jax.live_arrays()), programs(same)
    x = same(Y)
    y = x * 2 + 17.5
    held = len(jax.live_arrays())
    del y
    seam_of(same).arithmetic.compute()
    assert programs(same) == count
    del x
    assert len(jax.live_arrays()) < held
    gc.collect()
    # What was uploaded stays as long as its tensor on the host.
    assert len(jax.live_arrays()) <= before + 1


def test_the_host_is_ahead_by_the_programs_of_one_step(
    same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    one = seam_of(same).arithmetic
    one.wait()
    x = same(Y)
    monkeypatch.setattr(arithmetic.jax, "block_until_ready", waited.append)
    for number in range(4):
        x = x * 2
        one.compute()
        assert len(waited) == max(0, number - 1)


def test_what_was_recorded_is_there_after_the_port() -> None:
    ported = tpuport.port(Same(), mesh="sp=2")
    found = ported(Y) * 2
    tpuport.unport(ported)
    assert found.value.array is not None
    assert alike(found.on_host(), Y * 2)


def test_a_loop_that_never_calls_is_computed_now_and_then(
    same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "MOST_WAITING", 8)
    x, expected = same(Y), Y
    for _ in range(20):
        x, expected = x * 1.5 - 1, expected * 1.5 - 1
    assert torch.allclose(x.on_host(), expected, rtol=1e-5, atol=1e-5)


def test_a_small_result_is_read(monkeypatch: pytest.MonkeyPatch, same: Any) -> None:
    monkeypatch.setattr(program_runs, "FEWEST", Y.numel() + 1)
    assert not isinstance(same(Y) * 2, DeviceTensor)
