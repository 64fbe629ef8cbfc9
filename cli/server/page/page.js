// Speaks the paths of docs/serve.md and nothing else.

const KEY = "tpuport-key";
const IMAGES = "tpuport-images";
const BUSY = 1000, QUIET = 4000; // milliseconds between two looks
const FIRST = 1000, LONGEST = 15000; // and between two tries, while the server is away
const PATIENCE = 30000; // for an answer
const TRIES = 6; // of a request whose answer is lost

const at = (id) => document.getElementById(id);
const known = new Map(); // id -> what is shown of a job
const images = new Map(); // id -> the file that the job starts from
let ready = null; // the newest answer of /ready
let timer = 0, running = false, again = false, pause = FIRST;

class Refused extends Error {
  constructor(status, told) {
    super(told?.message || `the server answers ${status}`);
    this.status = status;
    this.param = told?.param;
    this.lost = [0, 502, 504].includes(status); // the server may have done what it was asked
    this.away = this.lost || status === 503;
  }
}

// ---- requests

async function asked(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, { signal: AbortSignal.timeout(PATIENCE), ...options, headers });
  } catch {
    return gone();
  }
}

async function checked(path, options) {
  const answer = await asked(path, options);
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error);
}

const gone = () => { throw new Refused(0, { message: "the server does not answer" }); };
const read = async (path, options) => (await checked(path, options)).json().catch(gone);

const content = async (id, variant, index = 0) => {
  const signal = AbortSignal.timeout(20 * PATIENCE);
  const query = new URLSearchParams({ variant, index });
  const answer = await checked(`v1/videos/${id}/content?${query}`, { signal });
  return URL.createObjectURL(await answer.blob().catch(gone));
};

// A request is checked before the queue; the first check waits for imports.
const checking = () => AbortSignal.timeout(11 * PATIENCE);

const post = (fields, image, key) => {
  const headers = { "Idempotency-Key": key };
  if (!image) {
    headers["Content-Type"] = "application/json";
    return read("v1/videos", { method: "POST", signal: checking(), headers, body: JSON.stringify(fields) });
  }
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    body.set(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  body.set("input_reference", image, image.name);
  return read("v1/videos", { method: "POST", signal: checking(), headers, body });
};

const anyKey = () => [...crypto.getRandomValues(new Uint32Array(4))].join("-");

// A request that is sent again after its answer was lost is the same job.
async function create(fields, image) {
  const key = anyKey();
  let lost = false;
  for (let left = TRIES - 1, wait = FIRST; ; left--, wait = Math.min(2 * wait, LONGEST)) {
    try {
      return await post(fields, image, key);
    } catch (error) {
      lost ||= error.lost;
      if (!lost || !error.away) throw error;
      if (!left) {
        error.message = `No answer: ${error.message}. The server may have the video: look at the list before you press the button again`;
        throw error;
      }
      trouble("The server does not answer; asking again.");
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

// ---- words

const tell = (text) => { at("said").textContent = text; };
const trouble = (text) => { at("trouble").textContent = text; };
const short = (text) => (text.length > 60 ? `${text.slice(0, 57)}...` : text);
const seconds = (s) => (s < 100 ? `${s < 10 ? s.toFixed(1) : Math.round(s)} s` : `${Math.round(s / 60)} min`);
const bytes = (n) => `${(n / 2 ** 30).toFixed(1)} GiB`;
const open = (job) => job.status === "queued" || job.status === "in_progress";

function howFar(job) {
  const about = job.tpuport;
  if (job.status === "queued") return about.position ? `Waiting, number ${about.position}` : "Waiting";
  if (job.status === "failed") return job.error?.message || "Failed";
  if (job.status === "completed") return about.total_seconds === null ? "Made" : `Made in ${seconds(about.total_seconds)}`;
  const steps = about.stage === "denoise" && about.steps ? `Step ${about.step} of ${about.steps}` : about.stage || "Starting";
  return about.seconds_left >= 0.5 ? `${steps}, ${seconds(about.seconds_left)} left` : steps;
}

function settingsOf(job) {
  const { settings, stages, peak_host_bytes: host, peak_device_bytes: device, ...about } = job.tpuport;
  const found = { model: job.model, size: job.size, frames: about.frames ?? about.num_frames, fps: about.fps, ...settings };
  delete found.prompt;
  delete found.num_frames; // the file's are shown
  found.seed = about.seeds.join(", ");
  for (const [stage, took] of Object.entries(stages || {})) found[stage] = seconds(took);
  if (host) found["peak memory"] = bytes(host);
  if (device) found["peak memory of a chip"] = bytes(device);
  return Object.entries(found).map(([name, value]) => [
    name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value),
  ]);
}

// ---- one job

function shownJob(job) {
  const node = at("job").content.firstElementChild.cloneNode(true);
  const find = (query) => node.querySelector(query);
  const shown = { job, node, find, urls: [], step: -1, visible: false, loads: false, done: false };
  node.id = job.id;
  find("article").setAttribute("aria-labelledby", `${job.id}-title`);
  find("h3").id = `${job.id}-title`;
  find("h3").textContent = job.prompt;
  find(".again").addEventListener("click", () => makeAgain(shown.job));
  find(".remove").addEventListener("click", () => remove(shown));
  watcher.observe(node);
  node.shown = shown;
  known.set(job.id, shown);
  return shown;
}

const watcher = new IntersectionObserver((seen) => {
  for (const one of seen) {
    one.target.shown.visible = one.isIntersecting;
    fetchFor(one.target.shown);
  }
}, { rootMargin: "200px" });

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function update(shown, job) {
  const before = shown.job.status;
  shown.job = job;
  const { find, node } = shown;
  node.className = job.status;
  put(find(".how"), howFar(job));
  put(find(".remove"), open(job) ? "Cancel" : "Delete");
  find("progress").hidden = !open(job);
  find("progress").value = job.status === "in_progress" ? job.progress : 0;
  if (job.status === "queued") find("progress").setAttribute("aria-valuetext", howFar(job));
  else find("progress").removeAttribute("aria-valuetext");
  if (!open(job)) {
    find("details").hidden = false;
    const rows = settingsOf(job);
    if (find("dl").childElementCount !== 2 * rows.length) {
      find("dl").replaceChildren(...rows.flatMap(([name, value]) => [
        Object.assign(document.createElement("dt"), { textContent: name }),
        Object.assign(document.createElement("dd"), { textContent: value }),
      ]));
    }
  }
  if (before !== job.status) tell(`${short(job.prompt)}: ${howFar(job)}`);
  fetchFor(shown);
}

async function fetchFor(shown) {
  const { job } = shown;
  if (shown.loads || !shown.visible) return;
  const previewed = job.status === "in_progress" && job.tpuport.preview && shown.step !== job.tpuport.step;
  const finished = job.status === "completed" && !shown.done;
  if (!previewed && !finished) return;
  shown.loads = true;
  try {
    if (previewed) await preview(shown, job);
    else await videos(shown, job);
  } catch (error) {
    if (!(error instanceof Refused)) throw error; // else the next look tries again
  } finally {
    shown.loads = false;
  }
}

async function preview(shown, job) {
  const url = await content(job.id, "preview");
  if (!known.has(job.id)) return URL.revokeObjectURL(url);
  const image = shown.find(".preview");
  URL.revokeObjectURL(image.src);
  image.src = url;
  image.alt = `Preview at step ${job.tpuport.step}: ${short(job.prompt)}`;
  image.hidden = false;
  shown.step = job.tpuport.step;
}

async function videos(shown, job) {
  const several = job.tpuport.seeds.length > 1;
  const urls = await Promise.all(job.tpuport.seeds.map((_, n) => content(job.id, "video", n)));
  if (!known.has(job.id)) return urls.forEach(URL.revokeObjectURL);
  shown.urls = urls;
  const [video, link] = [shown.find("video"), shown.find(".download")];
  urls.forEach((url, n) => {
    const seed = job.tpuport.seeds[n];
    const own = n ? video.cloneNode() : video;
    const way = n ? link.cloneNode(true) : link;
    if (n) shown.find("details").before(own), shown.find(".again").before(way);
    own.src = url;
    own.setAttribute("aria-label", `Video, seed ${seed}: ${short(job.prompt)}`);
    way.href = url;
    way.download = `${job.model}-seed${seed}.mp4`;
    way.textContent = several ? `Download, seed ${seed}` : "Download";
    own.hidden = way.hidden = false;
  });
  forget(shown.find(".preview"));
  shown.done = true;
}

function forget(image) {
  URL.revokeObjectURL(image.src);
  image.removeAttribute("src");
  image.hidden = true;
}

function drop(shown) {
  const inside = shown.held || shown.node.contains(document.activeElement);
  watcher.unobserve(shown.node);
  known.delete(shown.job.id);
  images.delete(shown.job.id);
  shown.urls.forEach(URL.revokeObjectURL);
  forget(shown.find(".preview"));
  shown.node.remove();
  if (inside) (at("jobs").querySelector("button") || at("prompt")).focus();
}

async function remove(shown) {
  const { job } = shown;
  if (!open(job) && !confirm(`Delete the video "${short(job.prompt)}" from the server?`)) return;
  shown.held = shown.node.contains(document.activeElement); // what is disabled loses the focus
  shown.find(".remove").disabled = true;
  try {
    await checked(`v1/videos/${job.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) {
      shown.find(".remove").disabled = false;
      return trouble(`Not ${open(job) ? "cancelled" : "deleted"}: ${error.message}.`);
    }
  }
  drop(shown);
  tell(`${short(job.prompt)}: ${open(job) ? "cancelled" : "deleted"}`);
  look();
}

// ---- new ones

const withImage = () => JSON.parse(sessionStorage.getItem(IMAGES) || "[]");
const anySeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

async function make(fields, image) {
  trouble("");
  for (const field of at("ask").elements) field.removeAttribute("aria-invalid");
  at("make").disabled = true;
  try {
    const job = await create(fields, image);
    trouble("");
    if (image) {
      images.set(job.id, image);
      sessionStorage.setItem(IMAGES, JSON.stringify([...withImage(), job.id].slice(-100)));
    }
    tell(`${short(job.prompt)}: in the queue`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    trouble(`${error.message}.`.replace(/\.\.$/, "."));
    const names = { prompt: "prompt", size: "shape", num_frames: "shape", num_inference_steps: "steps", seed: "seed", input_reference: "image" };
    const field = at(names[error.param]);
    if (field) {
      field.setAttribute("aria-invalid", "true");
      field.focus();
    }
  } finally {
    at("make").disabled = !at("shape").options.length;
  }
  look();
}

function asIs() {
  const [size, frames] = at("shape").value.split("/");
  const fields = { prompt: at("prompt").value, seed: Number(at("seed").value || 0) };
  // A pipeline may have no sizes, or no frames.
  if (size !== "null") fields.size = size;
  if (frames !== "null") fields.num_frames = Number(frames);
  if (at("steps").value) fields.num_inference_steps = Number(at("steps").value);
  return fields;
}

function makeAgain(job) {
  const fields = { ...job.tpuport.settings, seed: anySeed() };
  const image = images.get(job.id);
  if (image || !(ready?.image === "required" || withImage().includes(job.id))) {
    return make(fields, image);
  }
  // The image is not here any more, as after a reload.
  at("prompt").value = job.prompt;
  at("shape").value = `${job.size}/${job.tpuport.num_frames}`;
  at("steps").value = fields.num_inference_steps || "";
  at("seed").value = fields.seed;
  at("image").focus();
  return trouble("Choose the image again, and make the video with the settings in the form.");
}

// ---- the server

function showReady(found) {
  const before = JSON.stringify(ready?.shapes);
  const first = ready === null;
  ready = found;
  put(at("model"), found.model || "");
  const words = { ready: "is ready", loading: "is loading", compiling: "is compiling", failed: "has failed" };
  const waits = found.queue?.queued ? `, ${found.queue.queued} waiting` : "";
  put(at("state"), `${words[found.status] || found.status}${found.error ? `: ${found.error}` : ""}${waits}`);
  at("image-row").hidden = !found.image;
  at("image").required = found.image === "required";
  at("steps").max = found.limits.num_inference_steps;
  if (first && found.defaults) {
    at("steps").placeholder = found.defaults.num_inference_steps ?? "";
    at("seed").value = found.defaults.seed ?? 0;
  }
  if (JSON.stringify(found.shapes) === before) return;
  const shapes = (found.shapes || []).filter((shape) => shape.state === "ready");
  // A server that starts again has the same shapes soon.
  if (!shapes.length && found.status !== "ready" && at("shape").options.length) return;
  const chosen = at("shape").value || `${found.defaults?.size}/${found.defaults?.num_frames}`;
  at("shape").replaceChildren(...shapes.map((shape) => new Option(
    `${(shape.size ?? "its own size").replace("x", " × ")}, ${shape.frames ?? shape.num_frames} frames, ${seconds(Number(shape.seconds))}`,
    `${shape.size}/${shape.num_frames}`,
  )));
  at("shape").value = chosen;
  if (at("shape").selectedIndex < 0) at("shape").selectedIndex = 0;
  at("make").disabled = shapes.length === 0;
}

function showList(list) {
  const named = new Set(list.data.map((job) => job.id));
  const oldest = list.data.at(-1)?.created_at ?? 0;
  for (const shown of [...known.values()]) {
    const newer = !list.has_more || shown.job.created_at > oldest;
    if (newer && !named.has(shown.job.id)) drop(shown);
  }
  let next = at("jobs").firstElementChild;
  for (const job of list.data) next = place(job, next);
  at("more").hidden = !(list.has_more && known.size <= list.data.length);
}

function place(job, next) {
  const shown = known.get(job.id) || shownJob(job);
  if (shown.node === next) next = next.nextElementSibling;
  else at("jobs").insertBefore(shown.node, next);
  update(shown, job);
  return next;
}

async function older() {
  const last = at("jobs").lastElementChild;
  try {
    const list = await read(`v1/videos?limit=30&after=${last.id}`);
    for (const job of list.data) place(job, null);
    at("more").hidden = !list.has_more;
    last.nextElementSibling?.querySelector("button").focus();
  } catch (error) {
    trouble(`No older videos: ${error.message}.`);
  }
}

// Jobs that are open, and older than the newest page.
async function followed(list) {
  const named = new Set(list.data.map((job) => job.id));
  const others = [...known.values()].filter((shown) => open(shown.job) && !named.has(shown.job.id));
  for (const shown of others) {
    try {
      update(shown, await read(`v1/videos/${shown.job.id}`));
    } catch (error) {
      if (error.status !== 404) throw error;
      drop(shown);
    }
  }
}

async function once() {
  showReady(await (await asked("ready")).json().catch(gone));
  const list = await read("v1/videos?limit=30");
  showList(list);
  await followed(list);
  at("empty").hidden = known.size > 0;
}

// One look at a time; a look that is asked for meanwhile follows.
async function look() {
  clearTimeout(timer);
  if (running) {
    again = true;
    return;
  }
  running = true;
  let wait;
  try {
    await once();
    if (pause !== FIRST || at("trouble").dataset.of === "look") trouble("");
    at("trouble").dataset.of = "";
    pause = FIRST;
    wait = [...known.values()].some((shown) => open(shown.job)) || ready.status !== "ready" ? BUSY : QUIET;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    wait = pause;
    pause = Math.min(2 * pause, LONGEST);
    if (error.status === 401) {
      for (const shown of [...known.values()]) drop(shown);
      trouble("The server wants an API key.");
      at("trouble").dataset.of = "look";
      wait = LONGEST;
    } else {
      put(at("state"), `does not answer; trying again in ${wait / 1000} s`);
    }
  } finally {
    running = false;
  }
  timer = setTimeout(look, again ? 0 : wait);
  again = false;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  make(asIs(), at("image-row").hidden ? undefined : at("image").files[0]);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
at("image").addEventListener("change", () => {
  const [file] = at("image").files;
  forget(at("image-shown"));
  if (file) {
    at("image-shown").src = URL.createObjectURL(file);
    at("image-shown").hidden = false;
  }
});
at("key").value = sessionStorage.getItem(KEY) || "";
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  pause = FIRST;
  look();
});
at("more").addEventListener("click", older);
look();
