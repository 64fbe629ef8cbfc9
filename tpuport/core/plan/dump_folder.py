"""The folder of ``plan --dump``: names, and what may be there already."""

from __future__ import annotations

import re
from pathlib import Path

from tpuport.core.enums import StageName
from tpuport.core.files.folders import check_own_folder

HLO, ACCOUNT = ".hlo.txt", ".account.json"

#: How a file begins, by the end of its name.
_BEGINS = {HLO: b"HloModule", ACCOUNT: b'{\n "stage":'}
_FILE = re.compile(rf"({'|'.join(StageName)})-.+-\d+-.+?(\.hlo\.txt|\.account\.json)")
_KERNEL = re.compile(r".+-[0-9a-f]{8}")
_OF_A_KERNEL = {"request.json", "cost.json", "schedule"}


def check_dump(folder: Path) -> None:
    """Refuse a folder in which there is anything that no earlier dump wrote.

    Raises:
        UsageError: what is there, or why the folder cannot be written to.
    """
    check_own_folder("--dump", folder, _is_own, "no earlier --dump wrote")


def _is_own(path: Path) -> bool:
    if path.is_dir():
        held = {inside.name for inside in path.iterdir()}
        return bool(_KERNEL.fullmatch(path.name)) and held <= _OF_A_KERNEL
    if file := _FILE.fullmatch(path.name):
        begin = _BEGINS[file[2]]
        with path.open("rb") as opened:
            return opened.read(len(begin)) == begin
    return False
