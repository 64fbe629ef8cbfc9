"""torchax imports on torch 2.13, torch stays as it was, and the day this can go."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version

from tpuport.core import compat

TORCH = Version(torch.__version__)

FACTS = """
import json, torch
from tpuport.core import compat

before = {op: set(getattr(torch.ops.aten, op).overloads())
          for op, _ in compat.DIMNAME_OVERLOADS}
listed = compat.DIMNAME_OVERLOADS
compat.DIMNAME_OVERLOADS = (*listed, ("all", "dim"))  # one that torch always has
missing = compat.missing_overloads()
declared = compat.declare_missing_overloads()
again = compat.declare_missing_overloads()
after = {op: set(getattr(torch.ops.aten, op).overloads()) for op in before}
torch.backends.mha.set_fastpath_enabled(FLAG)
compat.import_torchax()
print(json.dumps({
    "missing": missing,
    "declared": declared,
    "again": again,
    "added": [[op, o] for op in before for o in after[op] - before[op]],
    "flag": torch.backends.mha.get_fastpath_enabled(),
}))
"""


def in_a_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module", params=[True, False])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    done = in_a_fresh_process(FACTS.replace("FLAG", str(request.param)))
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "asked": request.param}


def test_only_the_overloads_that_torch_lacks_are_declared_and_once(
    facts: dict[str, Any],
) -> None:
    assert facts["declared"] == facts["missing"]
    assert sorted(facts["added"]) == sorted(facts["declared"])
    assert ["all", "dim"] not in facts["declared"]
    assert facts["again"] == []
    if Version("2.13") <= TORCH:
        assert ["all", "dimname"] in facts["declared"]


def test_the_fast_path_flag_is_left_as_it_was_set(facts: dict[str, Any]) -> None:
    assert facts["flag"] is facts["asked"]


@pytest.mark.skipif(Version("2.13") > TORCH, reason="torch before 2.13 has the names")
def test_torchax_still_needs_the_workaround() -> None:
    """When this fails, the workaround in core/compat.py can go."""
    done = in_a_fresh_process("import torchax")
    assert done.returncode != 0
    assert "AttributeError" in done.stderr.splitlines()[-1]


def test_every_operator_with_a_declared_overload_still_resolves() -> None:
    compat.import_torchax()
    aten = torch.ops.aten
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    row = torch.tensor([0])
    assert compat.missing_overloads() == ()
    assert aten.all(x).item() is True
    assert aten.all(x, 1).tolist() == [True, True]
    assert aten.prod(x).item() == 24
    assert aten.prod(x, 0).tolist() == aten.prod(x, dim=0).tolist() == [3.0, 8.0]
    assert aten.norm(x).item() == pytest.approx(30**0.5)
    assert aten.norm(x, 2, [0]).tolist() == pytest.approx([10**0.5, 20**0.5])
    assert aten.std(x, [0]).tolist() == pytest.approx([2**0.5] * 2)
    assert aten.std(x, [0], correction=0).tolist() == [1.0, 1.0]
    assert [t.tolist() for t in aten.std_mean(x, [0], correction=0)] == [[1, 1], [2, 3]]
    assert [t.tolist() for t in aten.unbind(x)] == [[1.0, 2.0], [3.0, 4.0]]
    assert aten.index_fill(x, 0, row, 9.0).tolist() == [[9, 9], [3, 4]]
    assert aten.index_add(x, 0, row, x[1:]).tolist() == [[4, 6], [3, 4]]
    assert aten.index_copy(x, 0, row, x[1:]).tolist() == [[3, 4], [3, 4]]
    assert aten.index_copy_(x.clone(), 0, row, x[1:]).tolist() == [[3, 4], [3, 4]]
    assert aten.index_fill_(x.clone(), 0, row, 9.0).tolist() == [[9, 9], [3, 4]]


def test_a_declared_overload_is_never_what_a_call_means() -> None:
    compat.import_torchax()
    with pytest.raises(RuntimeError):
        torch.ops.aten.all(torch.ones(2), "N")  # a dim by name, as before torch 2.13
    # Too few arguments for any real overload. A declared one that took this call would
    # be found to have no kernel, which is a NotImplementedError.
    with pytest.raises(RuntimeError) as caught:
        torch.ops.aten.index_add(torch.ones(2))
    assert caught.type is RuntimeError
