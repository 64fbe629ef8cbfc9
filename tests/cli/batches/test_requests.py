"""A line becomes settings as a flag or a key of YAML does, and a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.requests import Request, read_requests, text_of


def read(place: Path, *lines: str, **below: Any) -> list[Request | tuple[int, str]]:
    file = place / "prompts.jsonl"
    file.write_text("\n".join(lines), errors="surrogateescape")
    return list(read_requests(text_of(file), place / "out", Settings(**below)))


def requests(place: Path, *values: dict[str, Any], **below: Any) -> list[Request]:
    found = read(place, *map(json.dumps, values), **below)
    assert all(isinstance(one, Request) for one in found), found
    return [one for one in found if isinstance(one, Request)]


def test_a_line_wins_over_the_flags(tmp_path: Path) -> None:
    line = {"size": "32x16", "seed": [1, 2], "prompt": "a fox", "option": {"x": 1}}
    (found,) = requests(tmp_path, line, resolution="480p", num_inference_steps=3)
    asked = found.settings
    assert (asked.width, asked.height, asked.resolution) == (32, 16, None)
    assert (asked.seed, asked.prompt, asked.options) == ((1, 2), ("a fox",), {"x": 1})
    assert asked.num_inference_steps == 3
    names = [f"out/{found.key}-00{n}.mp4" for n in range(2)]
    assert found.paths == [tmp_path / name for name in names]


def test_the_key_is_the_id_or_a_hash_of_what_decides_the_video(tmp_path: Path) -> None:
    fox = {"prompt": "a fox", "steps": 2}
    image = tmp_path / "image.png"
    image.write_bytes(b"one")
    first, same, other, named, pictured = requests(
        tmp_path,
        fox,
        {"num-inference-steps": 2, "prompt": ["a fox"], "seed": 0},
        {**fox, "seed": 1},
        {**fox, "id": "fox"},
        {**fox, "image": str(image)},
    )
    assert first.key == same.key == first.digest[:16]
    assert (named.key, named.digest) == ("fox", first.digest)
    assert len({first.key, other.key, pictured.key}) == 3
    image.write_bytes(b"two")
    (changed,) = requests(tmp_path, {**fox, "image": str(image)})
    assert changed.key != pictured.key
    (elsewhere,) = requests(tmp_path, fox, cache_dir=tmp_path)
    assert elsewhere.key == first.key


def test_a_shape_is_what_programs_are_made_for(tmp_path: Path) -> None:
    base, prompt, size, mesh, together = requests(
        tmp_path,
        {"prompt": "a fox", "size": "32x16"},
        {"prompt": "a cat", "size": "32x16", "seed": 3},
        {"prompt": "a fox", "size": "16x16"},
        {"prompt": "a fox", "size": "32x16", "mesh": "dp=2"},
        {"prompt": "a fox", "size": "32x16", "batch_size": 2},
    )
    assert (base.shape, base.pipeline) == (prompt.shape, prompt.pipeline)
    assert (base.shape != size.shape, base.pipeline) == (True, size.pipeline)
    assert base.pipeline != mesh.pipeline
    assert base.shape != together.shape


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ', "line 2: is not JSON"),
        ("[1]", "line 2: is not a JSON object"),
        ('{"promt": "x"}', "line 2: unknown key 'promt'; did you mean prompt?"),
        ('{"steps": 0}', "line 2: steps: 0"),
        ('{"steps": 1, "num_inference_steps": 2}', "are the same setting"),
        ('{"prompt": "a", "prompt": "b"}', "has the key 'prompt' twice"),
        ('{"json": true}', "json is for all lines"),
        ('{"run_dir": "x"}', "run_dir is not for a batch"),
        ('{"id": "../x"}', "names no file"),
        ('{"out": "x/y.gif"}', "is not in the folder of the batch"),
        ('{"out": "runs/"}', "is a file of the batch itself"),
        ('{"distributed": true}', "distributed is not for a batch"),
        ('{"image": "~nobody-of-this-name/x.png"}', "home directory"),
        ('{"out": "x.avi"}', "line 2: out: x.avi: no video can be written"),
        ('{"prompt": " "}', "line 2: prompt: ' ' is empty; say what to show"),
        ('{"image": "a", "video": "b"}', "exclude each other"),
        ('{"prompt": "a \udcff"}', "line 2: prompt: "),  # a byte that is not UTF-8
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    good = '{"prompt": "a fox"}'
    first, (number, error), last = read(tmp_path, good, line, good)  # type: ignore
    assert (number, said in error) == (2, True), error
    assert isinstance(first, Request)
    assert isinstance(last, Request)
