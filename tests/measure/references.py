"""Makes the recorded videos anew: ``python -m tests.measure.references``.

Run from the root of a checkout; name records to make these alone. Upstream's own
pipelines run on the CPU in float32, on checkpoints that the project makes.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models.cogvideox import videos as cogvideox
from tests.models.hunyuanvideo import videos as hunyuanvideo
from tests.models.recorded import FOLDER

MODELS: dict[str, Any] = {
    name: model for model in (cogvideox, hunyuanvideo) for name in model.VIDEOS
}


def main() -> None:
    asked = sys.argv[1:] or list(MODELS)
    if unknown := set(asked) - set(MODELS):
        known = ", ".join(MODELS)
        raise SystemExit(f"no record {', '.join(sorted(unknown))}; there are {known}")
    with tempfile.TemporaryDirectory() as root:
        for name in asked:
            model = MODELS[name]
            video = model.VIDEOS[name]
            folder = Path(root, model.__name__, video.checkpoint)
            if not folder.exists():
                model.make_checkpoint(video.checkpoint, folder)
            path = video.live(folder).write(name, video.source(folder))
            print(f"{path.stat().st_size / 1e3:7.1f} kB  {path.name}", flush=True)
    total = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{total / 1e3:7.1f} kB in {FOLDER.name}/")


if __name__ == "__main__":
    main()
