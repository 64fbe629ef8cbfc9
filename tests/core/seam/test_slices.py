"""What a process reads of the weights: the slices that its devices hold, once each."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import fsspec
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.processes import run_json
from tpuport import targets
from tpuport.core.arrays import torch_dtype
from tpuport.core.files import stores
from tpuport.core.files.stores import LeftInStore
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.pipelines.stand_in import write_random
from tpuport.core.reports import Reporter
from tpuport.core.seam.arithmetic import Arithmetic
from tpuport.core.seam.devices import Devices
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.journal import Journal
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights import file_parts, hub
from tpuport.core.weights.stored_tensors import stored_in, unread
from tpuport.errors import WeightsError
from tpuport.plugins import folder_of, get_model

if TYPE_CHECKING:  # conftest imports jax its own way, and processes import this file
    from tests.conftest import Once

#: Mesh, layout and dtype; the files have float32.
CASES = (
    ("tp=4", "default", "float32"),
    ("dp=2,tp=2", "default", "bfloat16"),
    ("sp=4", "gathered", "float32"),
)
COMPONENTS = ("transformer", "text_encoder")

PROGRAM = """
import json, sys
import jax
from tests.core.seam.test_slices import placed, placed_from_a_store
from tpuport.core.weights import placement

place, number, *folders = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(place, 2, int(number))
placement.GATHERED_BYTES = 0
assert len(jax.local_devices()) == 2
assert len(jax.devices()) == 4
print(json.dumps([placed(folders), placed_from_a_store(folders[0])]))
jax.distributed.shutdown()  # waits for the other process
"""


def placed(folders: list[str]) -> dict[str, Any]:
    """For each component: bytes read, bytes of the files that its shards here come
    from, bytes of the files, and a hash of each shard."""
    made: dict[str, Any] = {}
    for number, path in enumerate(folders):
        folder = PipelineFolder.find(path, Reporter())
        for mesh, layout, dtype in CASES:
            settings = RunSettings(sharding=layout)
            there = targets.place(MeshSpec.parse(mesh), jax.devices()[:4], None)
            target = targets.claimed_target(
                folder.class_name, there, settings, Reporter()
            )
            pipeline = folder.load(torch_dtype(dtype), Reporter())
            for name in COMPONENTS:
                entry = _entry(getattr(pipeline, name), name, target)
                made[f"{number} {mesh} {name}"] = _read(entry)
    return made


def placed_from_a_store(path: str) -> dict[str, Any]:
    """For each component: bytes that the store gave, bytes of the headers, and those of
    :func:`placed`."""
    memory = fsspec.filesystem("memory")
    memory.put(f"{path}/", "/bucket/it/", recursive=True)
    given: Counter[str] = Counter()
    own = type(memory).cat_file

    def counted(self: Any, key: str, *args: Any, **how: Any) -> bytes:
        data: bytes = own(self, key, *args, **how)
        given[key.split("/")[-2]] += len(data)
        return data

    def whole(*_: Any) -> None:
        raise AssertionError("a whole file was fetched")

    several, made = SimpleNamespace(several=True), {}
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(stores.SCHEMES, {"memory": ("fsspec", "none")}),
        mock.patch.object(hub, "here", return_value=several),
        mock.patch.object(hub, "FINGERPRINT_WHOLE_BYTES", 0),
        mock.patch.object(file_parts, "GAP", 0),
        mock.patch.object(file_parts, "BLOCK", 4096),
        mock.patch.object(type(memory), "cat_file", counted),
    ):
        find = PipelineFolder.find("memory://bucket/it", Reporter(), Path(cache))
        folder = find.fetched(Reporter())
        there = targets.place(MeshSpec.parse("tp=4"), jax.devices()[:4], None)
        name = folder.class_name
        target = targets.claimed_target(name, there, RunSettings(), Reporter())
        pipeline = folder.load(torch.float32, Reporter())
        files = [*Path(cache).rglob("*.safetensors")]
        assert all(LeftInStore.by(file) for file in files)
        for name in COMPONENTS:
            headers = given[name]
            entry = _entry(getattr(pipeline, name), name, target)
            read = _read(entry)
            made[name] = (given[name] - headers, headers, *read)
    memory.store.clear()
    return made


def _entry(module: torch.nn.Module, name: str, target: Any) -> Entry:
    arithmetic = Arithmetic(Devices(target), Journal(Reporter()))
    return Entry(module, module.forward, name, arithmetic, lambda entry: None)


def _read(entry: Entry) -> tuple[int, int, int, dict[str, str]]:
    weights = entry._placed()
    ported = entry._port()
    stored = stored_in(ported.tensors().values())
    held, shards = 0, {}
    for name, array in weights.items():
        parts = {str(one.index): one.data for one in array.addressable_shards}
        for index, part in parts.items():
            numbers = np.asarray(part).tobytes()
            shards[f"{name} {index}"] = hashlib.sha256(numbers).hexdigest()
        if name not in ported.names.computed:
            held += 4 * sum(part.size for part in parts.values())
    read = sum(one.bytes_read for one in stored)
    return read, held, sum(one.bytes_stored for one in stored), shards


@pytest.fixture(scope="module")
def cogvideox_folder(once: Once) -> Path:
    """Eight heads and random weights in float32."""
    configs = get_model("cogvideox").variants["demo-i2v"].read(folder_of("cogvideox"))
    return once("demo-i2v", lambda folder: write_random(folder, configs))


def test_each_process_reads_what_its_devices_hold(
    cogvideox_folder: Path, hunyuanvideo_folders: dict[str, Path]
) -> None:
    """Two processes with two devices each, and one with all four.

    Takes long: two processes import everything.
    """
    folders = [str(cogvideox_folder), str(hunyuanvideo_folders["1.5"])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"

    def process(number: int) -> list[dict[str, Any]]:
        return run_json(PROGRAM, place, str(number), *folders, XLA_FLAGS=flags)

    with ThreadPoolExecutor(2) as pool:
        both_ways = list(pool.map(process, range(2)))
    from_store = [found[1] for found in both_ways]
    processes = [found[0] for found in both_ways]
    alone = json.loads(json.dumps(placed(folders)))
    for what, (read, held, whole, shards) in alone.items():
        assert read == held == whole, what
        parts = [found[what] for found in processes]
        for part_read, part_held, part_whole, _ in parts:
            assert part_read == part_held, what
            assert part_whole == whole
        both = {**parts[0][3], **parts[1][3]}
        assert both == shards, what
    # From a store: the headers and the same slices, and no other byte.
    for stored, on_disk in zip(from_store, processes, strict=True):
        for name, (fetched, header, read, held, _, shards) in stored.items():
            assert fetched == read == held, name
            assert shards == on_disk[f"0 tp=4 {name}"][3]
            assert 0 < header < 0.1 * on_disk[f"0 tp=4 {name}"][2]
    share = {what: processes[0][what][0] / alone[what][2] for what in alone}
    assert share["0 tp=4 transformer"] < 0.6
    assert share["0 tp=4 text_encoder"] < 0.6
    # Half of what is split, and all norms and biases.
    assert share["0 sp=4 transformer"] == pytest.approx(0.8014, abs=1e-4)
    # Halves along dp hold the same: each process has one row of the mesh.
    assert math.isclose(share["0 dp=2,tp=2 transformer"], 1)


def test_a_weight_has_its_dtype_before_it_is_read(cogvideox_folder: Path) -> None:
    """Nothing of a component is read by a load, and its numbers are upstream's."""
    folder = PipelineFolder.find(str(cogvideox_folder), Reporter())
    expected = folder.component_class("transformer").from_pretrained(
        cogvideox_folder / "transformer", torch_dtype=torch.bfloat16
    )
    found = folder.load_component("transformer", torch.bfloat16)
    stored = stored_in(found.parameters())
    assert len(stored) == len(list(found.parameters()))
    found.eval()
    assert found.dtype == torch.bfloat16
    assert not any(one.bytes_read for one in stored)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert all(one.bytes_read == one.bytes_stored for one in stored)


def test_what_upstream_loads_by_itself_is_read_by_upstream(
    cogvideox_folder: Path,
) -> None:
    with unread("x"):
        pass
    from transformers import T5EncoderModel

    found = T5EncoderModel.from_pretrained(cogvideox_folder / "text_encoder")
    assert not stored_in(found.parameters())


def test_numbers_that_are_written_are_placed(cogvideox_folder: Path) -> None:
    """Host code may change a weight, before the weight was read and after."""
    folder = PipelineFolder.find(str(cogvideox_folder), Reporter())
    target = targets.general_target(targets.place_for_port(None), RunSettings())
    module = folder.load_component("transformer", torch.float32)
    name = "patch_embed.proj.bias"
    weight = module.get_parameter(name)
    before = weight.detach().clone()
    entry = _entry(module, "transformer", target)
    entry._refresh()
    entry._placed()
    with torch.no_grad():
        weight.add_(1)
    entry._refresh()
    assert not entry.placed
    found = torch.from_numpy(np.array(entry._placed()[name]))
    assert torch.equal(found, before + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_computes_what_it_computes_with_read_weights(
    cogvideox_folder: Path, dtype: torch.dtype
) -> None:
    folder = PipelineFolder.find(str(cogvideox_folder), Reporter())
    ids = torch.arange(7)[None]
    module = folder.load_component("text_encoder", dtype)
    kind = type(module)
    expected = kind.from_pretrained(cogvideox_folder / "text_encoder", dtype=dtype)
    with torch.no_grad():
        assert torch.equal(module(ids)[0], expected(ids)[0])


def test_a_scalar_is_read_and_numbers_put_in_its_place_win(tmp_path: Path) -> None:
    """Host code gives a parameter other data, and ``.to`` of a module does."""
    file = tmp_path / "weights.safetensors"
    save_file({"scale": torch.tensor(3.5), "weight": torch.ones(4, 6)}, file)
    with unread("x"):
        found = load_file(file)
    assert stored_in(found.values())
    assert (found["scale"] + 0).item() == 3.5
    weight = torch.nn.Parameter(found["weight"])
    weight.data = torch.zeros(2, 6)
    assert torch.equal(weight + 0, torch.zeros(2, 6))
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.weight = torch.nn.Parameter(found["weight"])
    layer.to(torch.bfloat16)
    assert layer(torch.ones(1, 6, dtype=torch.bfloat16)).tolist() == [[6.0] * 4]


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(4, 6)}, file)
    with unread("x"):
        found = load_file(file)["weight"]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 8)
    with pytest.raises(WeightsError, match="has changed since"):
        found.sum()
