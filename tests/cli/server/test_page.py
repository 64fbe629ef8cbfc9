"""The page in a real browser, before a whole server of the demo.

Minutes: the server imports torch and jax and compiles, and is killed and started again.
``TPUPORT_SCREENSHOTS=1`` lets the first test write the pictures of docs/serve.md.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.cli.server.running import PATIENCE, Running, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs/images"
CHROMIUM = shutil.which("chromium")
PROMPT = "a red star bounces on a white background"
KEY = "a-key-of-the-test"
FLAGS = ("--folder", "kept", "--api-key-file", "keys", "--max-steps", "1000")
#: As many steps as the demo has, which hardly end before the test, and few.
MANY, FEW = 1000, 4

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")


class Served:
    """A server of the demo that is killed and started again at its port."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.place, self.environment = place, environment
        (place / "keys").write_text(f"{KEY}\n")
        self.running = Running(place, *FLAGS, environment=environment)
        self.port = str(self.running.port)

    def again(self) -> None:
        flags = (*FLAGS, "--port", self.port)
        self.running = Running(self.place, *flags, environment=self.environment)

    def ask(self, path: str, method: str | None = None) -> Any:
        return self.running.ask(path, method=method, key=KEY)

    def newest(self) -> Any:
        return self.ask("/v1/videos?limit=1")[1]["data"][0]


@pytest.fixture(scope="module")
def served(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    environment = {"TPUPORT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    made = Served(tmp_path_factory.mktemp("served"), environment)
    until(lambda: made.ask("/ready")[0] == 200, 3 * PATIENCE)
    yield made
    made.running.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The page with its key; nothing of it comes from elsewhere or goes wrong."""
    context = browser.new_context(viewport={"width": 1000, "height": 760})
    context.set_default_timeout(1000 * PATIENCE)
    found = context.new_page()
    wrong: list[str] = []
    hosts: set[str] = set()
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    found.goto(served.running.url)
    found.get_by_label("API key").fill(KEY)
    found.get_by_role("button", name="Use").click()
    found.locator("#shape option").first.wait_for(state="attached")
    yield found
    context.close()
    assert wrong == []
    assert hosts <= {f"127.0.0.1:{served.port}", ""}


def make(page: Page, prompt: str, steps: int) -> Locator:
    """Type a prompt, send the form, and the job that comes."""
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Steps").fill(str(steps))
    page.get_by_role("button", name="Make the video").click()
    job = of(page, prompt)
    job.wait_for()
    return job


def of(page: Page, prompt: str) -> Locator:
    return page.get_by_role("article", name=prompt, exact=True).first


def says(job: Locator, pattern: str) -> None:
    job.locator(".how", has_text=re.compile(pattern)).wait_for()


#: What a canvas shows of the video at some moments: RGBA, 64 x 64 pixels.
FRAMES = """async (video) => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 64;
  const drawn = canvas.getContext("2d", { willReadFrequently: true });
  const frames = [];
  video.pause();
  for (let n = 0; n < 4; n++) {
    const there = new Promise((done) => { video.onseeked = done; });
    video.currentTime = (n + 0.5) * video.duration / 4;
    await there;
    drawn.drawImage(video, 0, 0, 64, 64);
    frames.push([...drawn.getImageData(0, 0, 64, 64).data]);
  }
  return frames;
}"""

PLAYS = """async (video) => {
  await video.play();
  while (video.currentTime < 0.3) await new Promise(requestAnimationFrame);
  return video.currentTime;
}"""


def shapes_of(frame: list[int]) -> tuple[float, float]:
    """The shares of pixels that are white and red."""
    pixels = [frame[n : n + 3] for n in range(0, len(frame), 4)]
    white = sum(min(pixel) > 190 for pixel in pixels)
    red = sum(r > 130 and r - g > 80 for r, g, _ in pixels)
    return white / len(pixels), red / len(pixels)


def picture(page: Page, name: str, scheme: str) -> None:
    """A picture for the docs, where they are asked for."""
    if os.environ.get("TPUPORT_SCREENSHOTS"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(200)
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(path=IMAGES / f"serve-{name}.png")
        page.emulate_media(color_scheme="light")


def test_a_prompt_becomes_a_video_that_plays(
    page: Page, served: Served, tmp_path: Path
) -> None:
    job = make(page, "a preview", MANY)
    job.get_by_role("img", name=re.compile("Preview at step")).wait_for()
    preview = job.locator("img.preview")
    until(lambda: preview.evaluate("image => image.naturalWidth"))
    picture(page, "running", "light")
    first = preview.get_attribute("src")
    until(lambda: preview.get_attribute("src") not in (first, None))
    job.get_by_role("button", name="Cancel").click()
    job.wait_for(state="detached")
    job = make(page, PROMPT, 20)
    says(job, "^Made in ")
    video = job.locator("video")
    video.wait_for()
    assert video.evaluate(PLAYS) >= 0.3
    frames = video.evaluate(FRAMES)
    for frame in frames:
        white, red = shapes_of(frame)
        assert white > 0.6
        assert red > 0.01
    assert len({tuple(frame) for frame in frames}) == 4  # it moves
    job.get_by_text("Settings").click()
    told = job.locator("dl").inner_text()
    assert "num inference steps" in told
    assert "guidance scale" in told
    assert "denoise" in told
    picture(page, "done", "dark")
    with page.expect_download() as begun:
        job.get_by_role("link", name="Download").click()
    begun.value.save_as(tmp_path / "x.mp4")
    of_server = served.ask(f"/v1/videos/{served.newest()['id']}/content")[1]
    assert (tmp_path / "x.mp4").read_bytes() == of_server


def test_again_takes_another_seed_and_one_is_cancelled(
    page: Page, served: Served
) -> None:
    make(page, "a blue circle", FEW)
    first = served.newest()["tpuport"]["settings"]
    job = of(page, "a blue circle")
    job.get_by_role("button", name="Again, another seed").click()
    until(lambda: served.newest()["tpuport"]["settings"] != first)
    again = served.newest()["tpuport"]["settings"]
    assert again.pop("seed") != first.pop("seed")
    assert again == first
    long = make(page, "a long one", MANY)
    name = served.newest()["id"]
    says(long, "Waiting, number|Step")
    long.get_by_role("button", name="Cancel").click()
    long.wait_for(state="detached")
    assert served.ask(f"/v1/videos/{name}")[0] == 404
    says(job, "^Made in ")


def test_a_reload_in_mid_job_shows_the_job(page: Page, served: Served) -> None:
    job = make(page, "a green square", MANY)
    says(job, "^Step [1-9]")
    page.reload()
    job = of(page, "a green square")
    says(job, "^Step [1-9]")
    bar = job.get_by_role("progressbar")
    until(lambda: float(bar.get_attribute("value") or 0) > 0)
    job.get_by_role("button", name="Cancel").click()
    job.wait_for(state="detached")


def test_the_server_is_started_again_under_the_page(page: Page, served: Served) -> None:
    job = make(page, "a yellow triangle", 100)
    says(job, "^Step [1-9]")
    served.running.kill()
    page.get_by_text("does not answer; trying again in").wait_for()
    page.get_by_label("Prompt").fill("lost")
    page.get_by_role("button", name="Make the video").click()
    page.get_by_role("alert").get_by_text("No answer").wait_for()
    assert page.get_by_label("Prompt").input_value() == "lost"
    served.again()
    until(lambda: served.ask("/ready")[0] == 200, 3 * PATIENCE)
    says(job, "^Made in ")
    video = job.locator("video")
    video.wait_for()
    assert video.evaluate(PLAYS) >= 0.3
    assert page.get_by_role("alert").inner_text() == ""


def test_a_video_whose_answer_is_lost_is_made_once(page: Page, served: Served) -> None:
    """By each of two buttons, which are pressed at the same time."""
    keys: list[str] = []

    def lost(route: Route) -> None:
        if route.request.method != "POST":
            return route.fallback()
        keys.append(route.request.headers["idempotency-key"])
        if keys.count(keys[-1]) > 2:
            return route.fallback()
        route.fetch()
        return route.abort()

    def count() -> int:
        page.wait_for_timeout(100)  # answers to requests are given in here
        found = served.ask("/v1/videos?limit=100")[1]["data"]
        return sum(job["prompt"] == "a lost one" for job in found)

    make(page, "a lost one", FEW)
    name = of(page, "a lost one").locator("..").get_attribute("id")
    page.route("**/v1/videos", lost)
    page.get_by_role("button", name="Make the video").click()
    page.locator(f"#{name} .again").click()
    page.get_by_role("alert").get_by_text("asking again").wait_for()
    until(lambda: page.locator("#make:enabled").count() and len(keys) == 6)
    page.get_by_role("alert").get_by_text("asking again").wait_for(state="detached")
    assert len(set(keys)) == 2
    assert count() == 3
    page.get_by_role("button", name="Make the video").click()  # a request of its own
    until(lambda: count() == 4 and len(keys) == 9)
    page.get_by_role("alert").get_by_text("asking again").wait_for(state="detached")


def test_a_server_that_answers_is_not_asked_again(page: Page) -> None:
    asked: list[str] = []

    def full(route: Route) -> None:
        if route.request.method != "POST":
            return route.fallback()
        asked.append(route.request.url)
        return route.fulfill(status=503, json={"error": {"message": "it is ending"}})

    page.route("**/v1/videos", full)
    page.get_by_label("Prompt").fill("a fox")
    page.get_by_role("button", name="Make the video").click()
    page.get_by_role("alert").get_by_text("it is ending.", exact=True).wait_for()
    assert len(asked) == 1


#: Of each thing that takes the focus, one Tab after the other: tag, id and name.
NAMED = """(element) => {
  const label = element.labels?.[0]?.textContent || element.textContent;
  return [element.tagName, element.id, (element.ariaLabel || label || "").trim()];
}"""


def test_the_page_is_used_with_keys_alone(page: Page, served: Served) -> None:
    page.reload()
    page.locator("#shape option").first.wait_for(state="attached")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.locator(":focus").evaluate(NAMED))
        assert reached[-1][2], reached
        outline = page.locator(":focus").evaluate(
            "element => getComputedStyle(element).outlineStyle"
        )
        assert outline == "solid"
        if reached[-1][1] == "make":
            break
    ids = [one[1] for one in reached if one[1]]
    assert [i for i in ids if i != "image"] == [
        *("key", "prompt", "shape", "steps", "seed", "make")
    ]
    page.get_by_label("Steps").focus()
    page.keyboard.type(str(MANY))
    page.get_by_label("Prompt").focus()
    page.keyboard.type("by keys")
    page.keyboard.press("Control+Enter")
    job = of(page, "by keys")
    job.wait_for()
    cancel = job.get_by_role("button", name="Cancel")
    cancel.focus()
    page.keyboard.press("Enter")
    job.wait_for(state="detached")
    assert page.locator(":focus").count() == 1


#: The least contrast of texts with what is behind them, by WCAG's formula.
CONTRAST = """() => {
  const drawn = document.createElement("canvas").getContext("2d");
  const rgba = (colour) => {
    drawn.clearRect(0, 0, 1, 1);
    drawn.fillStyle = colour;
    drawn.fillRect(0, 0, 1, 1);
    return [...drawn.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).map((c) => c / 255).map(
      (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    while (rgba(getComputedStyle(element).backgroundColor)[3] < 255) {
      element = element.parentElement;
    }
    return getComputedStyle(element).backgroundColor;
  };
  const ratios = [...document.querySelectorAll("h1,h2,h3,p,label,button,select")]
    .filter((element) => element.offsetParent && !element.disabled)
    .map((element) => {
      const pair = [getComputedStyle(element).color, behind(element)].map(light);
      return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    });
  return Math.min(...ratios);
}"""


def test_light_and_dark_are_readable(page: Page) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(CONTRAST) >= 4.5
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_a_wrong_key_shows_no_job_and_asks_for_one(page: Page, served: Served) -> None:
    page.get_by_label("API key").fill("another-key")
    page.get_by_role("button", name="Use").click()
    page.get_by_role("alert").get_by_text("wants an API key").wait_for()
    assert page.get_by_role("article").count() == 0


def test_a_refusal_is_shown_at_its_field(page: Page) -> None:
    page.get_by_label("Prompt").fill("a fox")
    page.get_by_label("Steps").fill("100000")
    page.locator("#ask").evaluate("form => { form.noValidate = true; }")
    page.get_by_role("button", name="Make the video").click()
    page.get_by_role("alert").get_by_text("num_inference_steps").wait_for()
    assert page.locator("#steps:focus").get_attribute("aria-invalid") == "true"
