"""A dump goes to an empty folder, or to one that only dumps wrote to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpuport.core.plan.dump_folder import check_dump
from tpuport.errors import UsageError


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", "mine"),
        ("denoise-step-0-dp1-sp1-tp1.hlo.txt", "mine"),
        ("denoise-step-0-dp1-sp1-tp1.account.json", '{"mine": 1}'),
        ("mine-step-0-dp1-sp1-tp1.hlo.txt", "HloModule mine"),
        ("splash-0123abcd/mine", ""),
        ("splash/cost.json", ""),
    ],
)
def test_what_no_dump_wrote_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "encode-encode-0-dp2-sp1-tp1.hlo.txt").write_text("HloModule jit")
    kept = tmp_path / "denoise-first uint8-12-dp2-sp1-tp1.account.json"
    kept.write_text('{\n "stage": "denoise"}')
    kernel = tmp_path / "tpuport_splash-d8c6a4de"
    (kernel / "schedule").mkdir(parents=True)
    (kernel / "cost.json").touch()
    (tmp_path / ".tpuport-of-a-killed-one.tmp").touch()
    check_dump(tmp_path)
    check_dump(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(UsageError, match=r"holds .*, which no earlier --dump wrote; "):
        check_dump(tmp_path)
