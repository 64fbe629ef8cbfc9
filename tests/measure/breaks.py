"""Breaks the code on purpose and shows that the short gate sees each break.

``python -m tests.measure.breaks`` copies the checkout, puts one fault after the other
into the copy, and runs the tests that must fail. Exit status 1 says that a fault went
unseen, or that a fault no longer fits the code. A quarter of an hour on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Break:
    """One fault.

    Attributes:
        what: in words, as in CONTRIBUTING.md.
        file: that it is in.
        before, after: text of the file, which has ``before`` once, and the faulty text.
        test: what pytest is given; a test in it must fail.
    """

    what: str
    file: str
    before: str
    after: str
    test: str


BREAKS = (
    Break(
        "a causal mask off by one",
        "tpuport/kernels/attention/splash_kernel.py",
        "allowed &= k_ids <= q_ids + self.plan.right",
        "allowed &= k_ids <= q_ids + self.plan.right + 1",
        "tests/kernels/attention/test_splash.py",
    ),
    Break(
        "rows and columns of a patch exchanged in a native block",
        "tpuport/models/cogvideox/native.py",
        "y.reshape(batch, *grid, -1, p, p).transpose(0, 1, 4, 2, 5, 3, 6)",
        "y.reshape(batch, *grid, -1, p, p).transpose(0, 1, 4, 2, 6, 3, 5)",
        "tests/models/cogvideox/test_native.py",
    ),
    Break(
        "a sharding rule dropped",
        "tpuport/models/cogvideox/sharding.py",
        'r"(norm[12]|norm_out)\\.linear\\.weight": ("tp", None),',
        "",
        "tests/models/cogvideox/test_plugin.py",
    ),
    Break(
        "a file that is renamed before its bytes are on disk",
        "tpuport/core/files/atomic.py",
        "os.fsync(opened.fileno())",
        "pass",
        "tests/core/files/test_atomic.py",
    ),
    Break(
        "a halo from the wrong end of the neighbour",
        "tpuport/core/mesh/spatial_split.py",
        "got = side.moved(cut(n - before, n), 1)",
        "got = side.moved(cut(0, before), 1)",
        "tests/core/mesh/test_spatial_split.py",
    ),
    Break(
        "a call's answer taken for the next one's",
        "tpuport/core/drive/tape.py",
        "return self._again(self.before.calls[number], asked)",
        "return self._again(self.before.calls[number - 1], asked)",
        "tests/core/drive/test_tape.py",
    ),
    Break(
        "an extrapolation through the wrong step",
        "tpuport/core/spec/step_cache.py",
        "(step - o) / (node - o)",
        "(step - o - 1) / (node - o)",
        "tests/core/spec/test_step_cache.py",
    ),
    Break(
        "the inputs of the second of two calls lost",
        "tpuport/core/seam/program_runs.py",
        "jnp.stack([one, next(others)]) if differs else one",
        "jnp.stack([one, one]) if differs else one",
        "tests/core/seam/test_pairs.py",
    ),
    Break(
        "a program found again for another mesh",
        "tpuport/core/programs/program_key.py",
        '"mesh": {axis: int(size) for axis, size in mesh.shape.items()},',
        '"mesh": {},',
        "tests/core/programs/test_program_key.py",
    ),
    Break(
        "a step of the ring skipped",
        "tpuport/core/layers/ring.py",
        "jax.lax.scan(one, carry, jnp.arange(last), unroll=2)",
        "jax.lax.scan(one, carry, jnp.arange(1, last), unroll=2)",
        "tests/core/layers/test_ring.py",
    ),
)


def outcome(test: str, copy: Path) -> int:
    """pytest's exit status: 0 where all tests pass, 1 where one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", test]
    return subprocess.run(
        command, cwd=copy, capture_output=True, check=False
    ).returncode


def seen(fault: Break, copy: Path) -> bool:
    """Whether the fault's test passes without the fault and fails with it.

    Raises:
        ValueError: the code no longer has the text that the fault changes.
    """
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.file} does not have once: {fault.before}")
    before = outcome(fault.test, copy)
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    try:
        after = outcome(fault.test, copy)
    finally:
        path.write_text(text, encoding="utf-8")
    return (before, after) == (0, 1)


def main() -> int:
    """Try all faults, or those whose words hold one of the arguments."""
    wanted = [b for b in BREAKS if not sys.argv[1:] or b.what in sys.argv[1:]]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        kept = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=kept)
        for fault in wanted:
            found = seen(fault, copy)
            missed += not found
            print(f"{'seen' if found else 'MISSED'}: {fault.what} ({fault.test})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
