"""``python -m tpuport``."""

from tpuport.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
