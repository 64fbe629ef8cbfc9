"""The demo's data, and the judge of what a model makes of it."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np

from training.demo.evaluate import asked, by_chance, right
from training.demo.judge import judge
from training.demo.model import TOKENS, tokenizer
from training.demo.shapes import FRAMES, MOTIONS, SIDE, Scene, scenes


def test_the_judge_sees_what_was_drawn() -> None:
    wanted, _ = asked(32)
    videos = [one.video() for one in wanted]
    assert videos[0].shape == (FRAMES, SIDE, SIDE, 3)
    seen = [judge(video) for video in videos]
    assert min(right(wanted, seen)) > 0.95
    # One colour or motion of eight is right by chance.
    assert max(by_chance(wanted, seen)) < 0.15


def test_the_judge_sees_two_shapes_and_none() -> None:
    two = next(one for one in scenes(5) if len(one.shapes) == 2)
    seen = {(one.colour, one.motion) for one in judge(two.video())}
    assert seen == {(one.colour, one.motion) for one in two.shapes}
    assert judge(np.full((FRAMES, SIDE, SIDE, 3), 125, np.uint8)) == []


def test_training_sees_nothing_that_is_held_out() -> None:
    def combinations(drawn: list[Scene]) -> set[tuple[str, str, str]]:
        return {(o.shape, o.colour, o.motion) for s in drawn for o in s.shapes}

    trained = combinations(list(islice(scenes(3), 4000)))
    held_out = combinations(asked(200)[0])
    assert not trained & held_out
    assert {motion for _, _, motion in held_out} == set(MOTIONS)
    assert len(trained) > 300


def test_each_word_of_a_caption_is_a_token() -> None:
    tokens, words = tokenizer(), random.Random(0)
    for one in islice(scenes(11), 300):
        caption = one.caption(words)
        pieces = tokens.tokenize(caption)
        assert len(pieces) <= TOKENS
        assert [p for p in pieces if p != ","] == [
            f"▁{word}" for word in caption.replace(",", "").split()
        ]
    assert "<unk>" not in tokens.tokenize("A panda plays Jazz, (loud)!")
