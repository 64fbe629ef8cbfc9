"""Bodies of requests: what is cut is no request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request

from tpuport.cli.server.bodies import asked_of
from tpuport.cli.server.messages import Refused

FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na fox\r\n'
    b'--edge\r\nContent-Disposition: form-data; name="seed"\r\n\r\n7\r\n--edge--\r\n'
)


def asked(body: bytes, kind: str = "multipart/form-data; boundary=edge") -> Any:
    """The fields of a body."""
    return both(body, kind)[0]


def both(body: bytes, kind: str) -> tuple[dict[str, Any], Any]:
    """The fields of a body, and its image."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return asyncio.run(asked_of(Request(scope, receive)))


def test_a_form_that_is_cut_anywhere_is_refused() -> None:
    """Also between two fields, where what came is a form but for its end."""
    assert asked(FORM) == {"prompt": "a fox", "seed": 7}
    for size in range(len(FORM) - 4):
        with pytest.raises(Refused) as caught:
            asked(FORM[:size])
        assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; a=b"])
def test_a_form_needs_a_boundary(kind: str) -> None:
    with pytest.raises(Refused, match="boundary"):
        asked(FORM, kind)


def form(*lines: str, image: bytes | None = None) -> tuple[dict[str, Any], Any]:
    """What curl sends of ``-F NAME=VALUE``."""
    parts: list[Any] = [(n, (None, v)) for n, _, v in (x.partition("=") for x in lines)]
    if image is not None:
        parts.append(("input_reference", ("input.png", image, "image/png")))
    sent = httpx.Request("POST", "http://x", files=parts)
    return both(sent.read(), sent.headers["content-type"])


def document(**given: Any) -> tuple[dict[str, Any], Any]:
    """What a client sends as JSON."""
    return both(json.dumps(given).encode(), "application/json")


def by_openai(**given: Any) -> tuple[dict[str, Any], Any]:
    """What the package of OpenAI sends."""
    found = []

    def answer(sent: httpx.Request) -> httpx.Response:
        found.append(both(sent.read(), sent.headers["content-type"]))
        return httpx.Response(200, json={"id": "video_1"})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(base_url="http://x/v1", api_key="none", http_client=http)
    client.videos.create(prompt="a fox", **given)
    return found[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "given",
    [
        {"extra": {"timesteps": [900, 100]}},
        {"extra": {"attention_kwargs": {"scale": 1}, "eta": 0.5, "on": True}},
        {"extra": {"a": {"b": {"c": [0.5, "x"]}, "d": "-"}}},
        {"lora": ["clay:0.5"], "extra": {"a": [True, False]}},
        {"lora": ["5", "clay:0.5"], "seed": 7, "guidance_scale": 1.5},
    ],
)
def test_objects_of_openais_package_arrive_as_they_were_sent(
    given: dict[str, Any],
) -> None:
    """It writes a form, and in the form ``extra[timesteps][]``."""
    assert by_openai(extra_body=given) == ({"prompt": "a fox", **given}, None)
    files = {"input_reference": ("x.png", b"x", "image/png")}
    found = by_openai(extra_body=given, **files)
    assert found == ({"prompt": "a fox", **given}, b"x")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("extra[a]=1", "extra[a]=2"), "given twice"),
        (("extra[a]=1", "extra[a][b]=2"), "in two ways"),
        (("extra[a][]=1", "extra[a][b]=2"), "in two ways"),
        (("extra[a][b]=1", "extra[a][]=2"), "in two ways"),
        (("extra={}", "extra[a]=2"), "in two ways"),
        (("seed=1", "seed=1"), "given twice"),
        (("extra" + "[a]" * 8 + "=1",), "nested too deep"),
        (("extra[a][][b]=1",), "give 'extra' as JSON text"),
        (("extra=" + " " * (1 << 20) + "{}",), "more than 1048576 bytes"),
        (("seed=1",) * 1001, "Too many fields"),
    ],
)
def test_a_form_that_fits_nothing_is_refused(lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(Refused, match=said):
        form(*lines)


def test_what_clients_of_vllm_omni_send_is_taken() -> None:
    """The lines of its docs/serving/videos_api.md, and its names of a LoRA."""
    lines = ("prompt=a lake", "width=1280", "height=720", "num_frames=80", "fps=16")
    given = {"prompt": "a lake", "size": "1280x720", "num_frames": 80, "fps": 16}
    assert form(*lines, "num_inference_steps=40") == (
        given | {"num_inference_steps": 40},
        None,
    )
    assert form(*lines, image=b"png") == (given, b"png")
    face = 'image_reference={"image_url": "https://example.com/face.png"}'
    assert form("prompt=a", face, "user=me") == (
        {"prompt": "a"},
        "https://example.com/face.png",
    )
    own = ('lora={"name": "clay", "scale": 0.8}', 'extra_params={"eta": 0.5}')
    found, _ = form("prompt=a", *own, "guidance_scale_2=3.5", "true_cfg_scale=4")
    assert found == {
        "prompt": "a",
        "lora": ["clay:0.8"],
        "extra": {"eta": 0.5, "guidance_scale_2": "3.5", "true_cfg_scale": "4"},
    }
    named = {"adapter": "clay", "lora_scale": 1, "lora_int_id": 3}
    assert document(lora=[named, "fox"])[0] == {"lora": ["clay:1", "fox"]}
    for wrong in (
        *({"width": 3}, {"width": 3, "height": 3, "size": "3x3"}),
        *({"lora": {"path": "/x"}}, {"lora": {"scale": 1}}),
        *({"extra_params": [1]}, {"extra_params": {"a": 1}, "extra": {"a": 2}}),
        *({"image_reference": {"file_id": "x"}}, {"extra": 3, "true_cfg_scale": 1}),
        {"image_reference": {"image_url": "x"}, "input_reference": "y"},
    ):
        with pytest.raises(Refused) as caught:
            document(prompt="a", **wrong)
        assert caught.value.status == 400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_clients_of_sglang_send_is_taken() -> None:
    """As its openai/video_api.py reads them: extra_body in JSON, and in a form."""
    own = {"fps": 16, "num_frames": 80, "diffusers_kwargs": {"eta": 0.5}}
    given = {"prompt": "a", "fps": 16, "num_frames": 80, "extra": {"eta": 0.5}}
    assert document(prompt="a", extra_body=own) == (given, None)
    assert form("prompt=a", f"extra_body={json.dumps(own)}") == (given, None)
    assert by_openai(extra_body={"extra_body": own})[0] == given | {"prompt": "a fox"}
    data = "data:image/png;base64,eA=="
    for name in ("input_reference", "reference_url"):
        assert document(prompt="a", **{name: data}) == ({"prompt": "a"}, data)
    with pytest.raises(Refused, match="'fps' is given twice"):
        document(prompt="a", fps=8, extra_body=own)
