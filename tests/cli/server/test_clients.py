"""``tpuport submit`` and the nodes of examples/comfyui, before a whole server.

The registry has no package of ComfyUI, so its modules are stood in for by what
docs.comfy.org says of them. Over 10 s: the server imports torch and jax, and compiles.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import socket
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.server.fake import Fake, picture
from tests.cli.server.running import Running, running, until
from tests.cli.tools import Cli

ROOT = Path(__file__).parents[3]
PACK = ROOT / "examples/comfyui"
#: The demo, as small as its autoencoder takes.
SHAPE = ("--size", "32x32", "--frames", "5", "--steps", "2")


class InterruptProcessingException(Exception):
    """ComfyUI's own, which ends a prompt without an error."""


@dataclass
class Comfy:
    """What ComfyUI is told, and what it tells.

    Attributes:
        progress: (value, total, preview) of every update of a bar.
        texts: (text, node) of every line.
        interrupted: whether Cancel was pressed.
    """

    progress: list[tuple[int, int, Any]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules that a pack imports."""
        comfy = self

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                self.total = total

            def update_absolute(
                self, value: int, total: int | None = None, preview: Any = None
            ) -> None:
                self.total = total or self.total
                if preview is not None:
                    kind, image, most = preview
                    assert kind in ("JPEG", "PNG")
                    image.convert("RGB").save(io.BytesIO(), kind)
                    assert most is None or most > 0
                comfy.progress.append((min(value, self.total), self.total, preview))

        class PromptServer:
            @staticmethod
            def send_progress_text(text: str, node_id: str, sid: Any = None) -> None:
                comfy.texts.append((text, node_id))

        PromptServer.instance = PromptServer()  # type: ignore[attr-defined]

        class VideoFromFile:
            def __init__(self, file: str | io.BytesIO) -> None:
                self.file = file

        def throw_exception_if_processing_interrupted() -> None:
            if comfy.interrupted:
                comfy.interrupted = False
                raise InterruptProcessingException

        found = {
            "comfy": {},
            "comfy.utils": {"ProgressBar": ProgressBar},
            "comfy.model_management": {
                "InterruptProcessingException": InterruptProcessingException,
                "throw_exception_if_processing_interrupted": (
                    throw_exception_if_processing_interrupted
                ),
            },
            "comfy_api": {},
            "comfy_api.input_impl": {"VideoFromFile": VideoFromFile},
            "server": {"PromptServer": PromptServer},
        }
        made = {name: types.ModuleType(name) for name in found}
        for name, values in found.items():
            vars(made[name]).update(values)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, made[name])
        return made


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Comfy:
    found = Comfy()
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.fixture
def nodes(comfy: Comfy, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The pack's nodes, loaded by its folder as ComfyUI does."""
    name = "custom_nodes_tpuport"
    spec = importlib.util.spec_from_file_location(
        name, PACK / "__init__.py", submodule_search_locations=[str(PACK)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    for part in ("jobs", "nodes"):
        monkeypatch.delitem(sys.modules, f"{name}.{part}", raising=False)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys()
    monkeypatch.setattr(sys.modules[f"{name}.nodes"], "_POLL", 0.02)
    return dict(module.NODE_CLASS_MAPPINGS)


@pytest.fixture
def fake(nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A server that the nodes ask again at once, for some seconds."""
    pack = nodes["TpuportTextToVideo"].__module__.removesuffix(".nodes")
    monkeypatch.setattr(sys.modules[f"{pack}.jobs"], "_FIRST", 0.01)
    monkeypatch.setattr(sys.modules[f"{pack}.jobs"], "PATIENCE", 5.0)
    preview = io.BytesIO()
    picture().save(preview, "png")
    found = Fake(video=b"a video", preview=preview.getvalue())
    found.start()
    yield found
    found.end()


#: Python's types of the values of an input.
KINDS = {"STRING": str, "INT": int, "FLOAT": float, "IMAGE": torch.Tensor}


def executed(node: Any, **given: Any) -> tuple[Any, ...]:
    """Call a node as ComfyUI's executor does: checked inputs, by name."""
    asked = node.INPUT_TYPES()
    assert set(asked) <= {"required", "optional", "hidden"}
    values: dict[str, Any] = {}
    for group in ("required", "optional"):
        for name, (kind, *about) in asked.get(group, {}).items():
            default = about[0].get("default") if about else None
            value = given.pop(name, default)
            assert isinstance(value, KINDS[kind]), name
            if kind in ("INT", "FLOAT"):
                assert about[0]["min"] <= value <= about[0]["max"]
            values[name] = value
    assert given == {}
    if asked["hidden"]["unique_id"] == "UNIQUE_ID":
        values["unique_id"] = "7"
    found = getattr(node(), node.FUNCTION)(**values)
    assert isinstance(found, tuple)
    assert len(found) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    return found


@pytest.fixture(scope="module")
def served(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    environment = {"TPUPORT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    place = tmp_path_factory.mktemp("served")
    with running(
        place,
        *SHAPE,
        "--folder",
        "kept",
        "--max-steps",
        "1000",
        environment=environment,
    ) as found:
        found.ready()
        yield found


def newest(served: Running) -> Any:
    return served.ask("/v1/videos?limit=1")[1]["data"][0]


def test_submit_writes_what_the_server_makes_and_replay_takes_it(
    cli: Cli, served: Running
) -> None:
    asked = ("submit", "--server", served.url, "--prompt", "a red star")
    own = ("--n", "2", "--seed", "4", "--option", "eta=0.0", "--guidance", "2")
    cli.good(*asked, *own, "--size", "32x32", "--out", "x.mp4")
    name = newest(served)["id"]
    for index in range(2):
        written = Path(f"x-00{index}.mp4").read_bytes()
        assert written == served.video(name, f"?index={index}")
    assert "the same frames" in cli.good("replay", "x-001.mp4").err


def test_settings_of_a_job_sent_again_make_the_same_video(served: Running) -> None:
    """They name what the request did not: another server has other defaults."""
    first = served.create(prompt="a red star")
    settings = served.done(first)["tpuport"]["settings"]
    assert settings == {
        "prompt": "a red star",
        "size": "32x32",
        "num_frames": 5,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "fps": 8.0,
        "seed": 0,
    }
    again = served.create(**settings)
    assert served.done(again)["tpuport"]["settings"] == settings
    assert served.video(again) == served.video(first)


def test_a_video_from_an_image_is_replayed_where_the_image_is(
    cli: Cli, served: Running
) -> None:
    """From the file that was sent; --image names it where it lies now."""
    Image.linear_gradient("L").resize((32, 32)).save("fox.png")
    asked = ("submit", "--server", served.url, "--prompt", "a red star", "--image")
    cli.good(*asked, "fox.png", "--out", "x.mp4")
    assert "the same frames" in cli.good("replay", "x.mp4").err
    Path("fox.png").rename("cat.png")
    cli.refused("name it with --image", "replay", "x.mp4", code=1)
    assert "the same frames" in cli.good("replay", "x.mp4", "--image", "cat.png").err


def test_submit_is_refused_in_the_servers_own_words(cli: Cli, served: Running) -> None:
    asked = ("submit", "--server", served.url, "--prompt", "a", "--out", "x.mp4")
    cli.refused("32x32", *asked, "--size", "8x8")
    cli.refused("num_inference_steps", *asked, "--steps", "100000")
    assert list(Path().iterdir()) == []


def test_text_to_video_shows_progress_and_a_preview(
    nodes: dict[str, Any], comfy: Comfy, served: Running
) -> None:
    node = nodes["TpuportTextToVideo"]
    asked = {"server": served.url, "prompt": "a red star", "steps": 400, "seed": 3}
    video, sidecar = executed(node, **asked, frames=5, extra='{"eta": 0.0}')
    job = newest(served)
    assert video.file.getvalue() == served.video(job["id"])
    assert json.loads(sidecar)["schema"] == "tpuport.sidecar"
    assert job["tpuport"]["settings"] == {
        "prompt": "a red star",
        "seed": 3,
        "num_inference_steps": 400,
        "size": "32x32",
        "num_frames": 5,
        "fps": 8.0,
        "guidance_scale": 6.0,
        "extra": {"eta": 0.0},
    }
    values = [value for value, total, _ in comfy.progress if total == 400]
    assert values == sorted(values)
    assert len(set(values)) > 1
    assert any(preview is not None for _, _, preview in comfy.progress)
    assert comfy.progress[-1][:2] == (1, 1)
    assert {node for _, node in comfy.texts} == {"7"}
    assert any(text.startswith("Step ") for text, _ in comfy.texts)


def test_image_to_video_uploads_the_first_image(
    nodes: dict[str, Any], served: Running
) -> None:
    node = nodes["TpuportImageToVideo"]
    image = torch.zeros(2, 32, 32, 3)
    image[0, ..., 0] = 1.0
    asked = {"server": served.url, "prompt": "a red star", "image": image, "steps": 2}
    video, sidecar = executed(node, **asked)
    assert video.file.getvalue() == served.video(newest(served)["id"])
    kept = [
        p for p in served.log.parent.glob("kept/**/*.png") if "preview" not in p.name
    ]
    pixels = [
        np.asarray(Image.open(path).convert("RGB"))[0, 0].tolist() for path in kept
    ]
    assert [255, 0, 0] in pixels
    assert "image" in sidecar


def test_an_interrupt_deletes_the_job(
    nodes: dict[str, Any], comfy: Comfy, served: Running
) -> None:
    node = nodes["TpuportTextToVideo"]
    before = served.ask("/v1/videos")[1]["data"]

    def press() -> None:
        until(lambda: any(text.startswith("Step ") for text, _ in comfy.texts))
        comfy.interrupted = True

    threading.Thread(target=press).start()
    asked = {"server": served.url, "prompt": "long", "steps": 1000}
    with pytest.raises(InterruptProcessingException):
        executed(node, **asked)
    assert served.ask("/v1/videos")[1]["data"] == before


@pytest.mark.parametrize("pictured", [False, True])
def test_a_node_whose_answer_is_lost_makes_one_job(
    nodes: dict[str, Any], fake: Fake, pictured: bool
) -> None:
    """Each run of the node is a job of its own."""
    fake.lost = 2
    node = nodes["TpuportImageToVideo" if pictured else "TpuportTextToVideo"]
    asked: dict[str, Any] = {"prompt": "a", "server": fake.url, "steps": 1}
    asked |= {"image": torch.zeros(1, 8, 8, 3)} if pictured else {}
    executed(node, **asked)
    assert [method for method, _, _ in fake.asked].count("POST") == 3
    assert len(fake.jobs) == 1
    executed(node, **asked)
    assert len(fake.jobs) == 2


@pytest.mark.parametrize("back", [True, False])
def test_an_interrupt_without_an_answer_deletes_the_job_or_tells_where_it_is(
    nodes: dict[str, Any],
    comfy: Comfy,
    fake: Fake,
    back: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Cancel comes while a lost answer is asked for."""
    fake.held.set()
    fake.lost = 2 if back else 3
    comfy.interrupted = True
    with pytest.raises(InterruptProcessingException):
        executed(nodes["TpuportTextToVideo"], prompt="a", server=fake.url)
    asked = [method for method, _, _ in fake.asked]
    assert asked == ["POST"] * 3 + ["DELETE"] * back
    told = f"the server may have the job: GET {fake.url}/v1/videos lists"
    assert (len(fake.jobs), told in caplog.text) == ((0, False) if back else (1, True))


@pytest.mark.parametrize(
    ("named", "sent"),
    [
        ("{fake.url}", True),
        ("{fake.url}/v1/", True),
        ("http://127.0.0.1:1", False),
        ("https://127.0.0.1:{fake.port}", False),
        ("http://localhost:{fake.port}", False),
        ("http://127.0.0.1:{fake.port}/other", False),
        ("", False),
    ],
)
def test_the_key_goes_to_the_server_of_the_environment_alone(
    nodes: dict[str, Any],
    fake: Fake,
    named: str,
    sent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A workflow of somebody else may name any server."""
    monkeypatch.setenv("TPUPORT_API_KEY", "a-secret-key")
    monkeypatch.setenv("TPUPORT_SERVER", named.format(fake=fake))
    executed(nodes["TpuportTextToVideo"], prompt="a", server=fake.url, steps=1)
    found = {headers.get("Authorization") for _, _, headers in fake.asked}
    assert found == ({"Bearer a-secret-key"} if sent else {None})


@pytest.mark.parametrize("pictured", [False, True])
def test_no_redirect_is_followed(
    nodes: dict[str, Any],
    cli: Cli,
    fake: Fake,
    pictured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by a node nor by `tpuport submit`: the key would go along."""
    other = Fake(video=b"", preview=b"")
    other.start()
    monkeypatch.setenv("TPUPORT_API_KEY", "a-secret-key")
    monkeypatch.setenv("TPUPORT_SERVER", fake.url)
    fake.moved = other.url
    try:
        image = {"image": torch.zeros(1, 8, 8, 3)} if pictured else {}
        node = nodes["TpuportImageToVideo" if pictured else "TpuportTextToVideo"]
        with pytest.raises(RuntimeError, match="redirects are not followed"):
            executed(node, prompt="a", server=fake.url, **image)
        asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", "x.mp4")
        flags = ("--image", "x.png") if pictured else ()
        picture().save("x.png")
        cli.refused("302, Found", *asked, *flags, code=1)
    finally:
        other.end()
    assert [method for method, _, _ in fake.asked] == ["POST"] * 2
    assert other.asked == []


def test_a_refusal_is_the_servers_own_words(
    nodes: dict[str, Any], served: Running
) -> None:
    node = nodes["TpuportTextToVideo"]
    asked = {"prompt": "a", "server": served.url}
    with pytest.raises(RuntimeError, match="size"):
        executed(node, **asked, size="8x8")
    with pytest.raises(RuntimeError, match="extra is no JSON"):
        executed(node, **asked, extra="{")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1", "cannot be reached"),
        ("http://127.0.0.1:x", "is no address"),
        ("https://127.0.0.1:{port}", "SSL"),
        ("http://127.0.0.1:{other}", "SSH-2.0"),
    ],
)
def test_a_wrong_address_is_an_error_at_once(
    nodes: dict[str, Any], comfy: Comfy, fake: Fake, address: str, said: str
) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    url = address.format(port=fake.port, other=other.getsockname()[1])

    def greet() -> None:
        with contextlib.suppress(OSError), other, other.accept()[0] as talk:
            talk.sendall(b"SSH-2.0-Other\r\n")
            talk.recv(1 << 16)

    greeter = threading.Thread(target=greet)
    greeter.start()
    try:
        with pytest.raises(RuntimeError, match=said):
            executed(nodes["TpuportTextToVideo"], prompt="a", server=url)
    finally:
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        greeter.join()
    assert comfy.texts == []
