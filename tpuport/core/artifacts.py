"""The run directory that the stages ``encode``, ``denoise`` and ``decode`` share.

A run directory holds one versioned ``run.json`` (what was asked for, which weights, and
one entry per finished stage), the tensors a stage hands to the next one, and the video.
It can be copied to another machine between two stages: nothing in it depends on where
it lies.

Two rules hold everywhere here. A file appears under its name whole or not at all, so a
stage that is killed leaves the previous state. And a file is used only after it has
been found to be the one that ``run.json`` records; anything else is refused by name
with :class:`~tpuport.errors.ArtifactError`, in one line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tpuport.core.arrays import dtype_name
from tpuport.errors import ArtifactError, UsageError, WeightsError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
RUN_SCHEMA = "tpuport.run"
SIDECAR_SCHEMA = "tpuport.sidecar"
RUN_FILE = "run.json"

#: The stages in the order they run, and the file each one leaves for the next.
STAGES = ("encode", "denoise", "decode")
STAGE_FILES = {"encode": "embeddings.safetensors", "denoise": "latents.safetensors"}

#: Files up to this size are fingerprinted whole, larger ones by samples.
FINGERPRINT_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 64
# Long enough for the JSON header of a sharded safetensors file.
_EDGE_BYTES = 1 << 20

_START_OVER = "start over in a new folder with `tpuport encode --run-dir NEW_FOLDER`"

_CHECKSUM = "checksum"
_ENVELOPE = ("schema", "schema_version", _CHECKSUM)


# --- writing a file whole or not at all


@contextlib.contextmanager
def replacing(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block succeeds.

    The block fills the file, or replaces it, and closes it. It is then flushed to disk,
    renamed over ``path``, and the rename itself is flushed. When the block or any of
    those steps fails, the temporary file is removed and ``path`` is what it was before.

    Args:
        path: the final name; its folder must exist.
        suffix: of the temporary name, for writers that choose a format by it.

    Raises:
        OSError: whatever the file system raised; callers turn it into their own error.
    """
    # Not made from the target's name, which may already be as long as names can be.
    temporary = path.parent / f".tpuport-{secrets.token_hex(8)}{suffix}"
    try:
        # Made here for its mode: the umask decides, as for any file a user makes.
        # safetensors replaces it by a file that only the owner may read.
        with temporary.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in ``folder``, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and FUSE file systems may not know how to flush a folder; the file's
        # own content is already flushed.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written; what was there before still is.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise _cannot_write(path, error) from error


def atomic_write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, whole or not at all.

    Raises:
        UsageError: ``data`` is not JSON (NaN and infinity are not).
        ArtifactError: the file cannot be written.
    """
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        encoded = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be written as JSON: {error}") from error
    atomic_write_bytes(path, encoded + b"\n")


def _cannot_write(path: Path, error: Exception) -> ArtifactError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ArtifactError(f"{path}: cannot be written: {_one_line(reason)}")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


# --- tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What one tensor of a stage's file must be.

    Attributes:
        name: its key in the file.
        shape: one entry per dimension. An int is that size; a string is a named size,
            such as "N", that must agree in all tensors of the file.
        dtypes: the allowed torch dtype names, such as "float32" or "bfloat16".
        optional: the file may lack it.
        note: what the tensor is, for people.
    """

    name: str
    shape: tuple[int | str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a TensorSpec needs a name")
        if isinstance(self.dtypes, str) or not self.dtypes:
            raise UsageError(
                f"TensorSpec {self.name!r}: dtypes must be a tuple of one or more"
                f" dtype names, not {self.dtypes!r}"
            )
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise UsageError(f"TensorSpec {self.name!r}: size {size} is negative")


def check_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
) -> None:
    """Check that ``tensors`` are those of ``specs``, no more and no fewer.

    Args:
        file: named in the message.

    Raises:
        ArtifactError: a tensor is missing or unexpected, or has a wrong shape or dtype,
            or two tensors disagree on a named size.
    """
    known = {spec.name: spec for spec in specs}
    required = {name for name, spec in known.items() if not spec.optional}
    if missing := sorted(required - tensors.keys()):
        raise ArtifactError(
            f"{file}: tensor {', '.join(missing)} is missing"
            f" (found: {', '.join(sorted(tensors)) or 'none'})"
        )
    if extra := sorted(tensors.keys() - known.keys()):
        raise ArtifactError(
            f"{file}: tensor {', '.join(extra)} is not expected"
            f" (expected: {', '.join(sorted(known)) or 'none'})"
        )
    sizes: dict[str, tuple[int, str]] = {}
    for name, spec in known.items():
        if name not in tensors:
            continue
        found = tuple(int(size) for size in tensors[name].shape)
        dtype = dtype_name(tensors[name].dtype)
        if dtype not in spec.dtypes:
            raise ArtifactError(
                f"{file}: tensor {name} is {dtype}, not {' or '.join(spec.dtypes)}"
            )
        expected = ", ".join(str(size) for size in spec.shape)
        wrong = f"{file}: tensor {name} has shape {list(found)}, not [{expected}]"
        if len(found) != len(spec.shape):
            raise ArtifactError(wrong)
        for asked, size in zip(spec.shape, found, strict=True):
            if isinstance(asked, int):
                if size != asked:
                    raise ArtifactError(wrong)
                continue
            agreed, first = sizes.setdefault(asked, (size, name))
            if size != agreed:
                raise ArtifactError(
                    f"{wrong}: {asked} is {size} here and {agreed} in tensor {first}"
                )


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
) -> None:
    """Write ``tensors`` to a safetensors file, whole or not at all, dtypes kept.

    Raises:
        ArtifactError: the tensors are not those of ``specs`` (nothing is written), or
            the file cannot be written (what was there before still is).
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_tensors(path, tensors, specs)
    # A copy, because safetensors refuses views and tensors that share memory.
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        with replacing(path) as temporary:
            save_file(plain, temporary)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from error


# --- versioned JSON documents


def _canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that checksums are taken of."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def _as_json(value: Any, what: str) -> Any:
    """``value`` as it reads back from JSON (tuples become lists), or UsageError."""
    try:
        return json.loads(_canonical(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} must be JSON: {_one_line(error)}") from error


def _checksum(document: Mapping[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != _CHECKSUM}
    return "sha256:" + hashlib.sha256(_canonical(content)).hexdigest()


def _write_document(path: Path, schema: str, content: Mapping[str, Any]) -> None:
    document = {"schema": schema, "schema_version": SCHEMA_VERSION, **content}
    atomic_write_json(path, {**document, _CHECKSUM: _checksum(document)})


def _read_document(path: Path, schema: str, remedy: str) -> dict[str, Any]:
    """The content of a versioned JSON file, without its envelope.

    Raises:
        ArtifactError: it is missing, truncated, of another schema or version, or not
            what was written.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; {remedy}") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: is not JSON, or is cut short ({_one_line(error)}); {remedy}"
        ) from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ArtifactError(
            f"{path}: has schema {_show(found)}, not {_show(schema)}; {remedy}"
        )
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise ArtifactError(
            f"{path}: has schema_version {_show(version)}, and this tpuport reads"
            f" {SCHEMA_VERSION}; "
            + (f"update tpuport, or {remedy}" if newer else remedy)
        )
    try:
        intact = document.get(_CHECKSUM) == _checksum(document)
    except ValueError:  # NaN, which Python reads and JSON does not have
        intact = False
    if not intact:
        raise ArtifactError(
            f"{path}: was altered after it was written (its checksum does not match);"
            f" {remedy}"
        )
    return {key: value for key, value in document.items() if key not in _ENVELOPE}


def _show(value: Any) -> str:
    """A JSON value on one line; ``None`` reads as "none"."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def sidecar_path(video: Path) -> Path:
    """Where the JSON beside a video lies: ``a.mp4`` -> ``a.mp4.json``.

    A folder of frames ``a`` gives ``a.png.json``, so that no name gives ``run.json``.
    """
    return video.with_name(video.name + (".json" if video.suffix else ".png.json"))


def write_sidecar(path: Path, data: Mapping[str, Any]) -> None:
    """Write the JSON that lies beside a video and says how it was made.

    Raises:
        UsageError: ``data`` is not JSON, or uses a key of the envelope ("schema",
            "schema_version", "checksum").
        ArtifactError: the file cannot be written.
    """
    if taken := [key for key in _ENVELOPE if key in data]:
        raise UsageError(f"{path}: the key {', '.join(taken)} is tpuport's own")
    _write_document(path, SIDECAR_SCHEMA, _as_json(dict(data), f"{path}: the data"))


def read_sidecar(path: Path) -> dict[str, Any]:
    """The data of a sidecar, as it was given to :func:`write_sidecar`.

    Raises:
        ArtifactError: the file is missing, truncated, of another schema or version, or
            altered.
    """
    remedy = "use the file as `tpuport` wrote it beside the video"
    return _read_document(path, SIDECAR_SCHEMA, remedy)


# --- fingerprints


def fingerprint_files(folder: Path, files: Sequence[Path]) -> str:
    """A fingerprint of the content of ``files``, wherever ``folder`` lies.

    It is a sha256 over the names relative to ``folder``, the sizes and the contents, in
    the order of the names. Files above 64 MiB are **sampled**: the first and last MiB
    and 64 evenly spaced chunks of 64 KiB, so that a checkpoint of 20 GB costs well
    under a second per file. A change inside a large file that touches no sample and
    leaves the size goes unseen; another checkpoint, another precision or a truncated
    download does not.

    Args:
        folder: what the names are relative to; links are not resolved, so that a hub
            snapshot of links has the fingerprint of the plain files.
        files: paths under ``folder``.

    Returns:
        64 hexadecimal digits.

    Raises:
        UsageError: there are no files, or one is not under ``folder``.
        WeightsError: a file is missing or cannot be read.
    """
    if not files:
        raise UsageError(f"{folder}: there are no files to fingerprint")
    named: dict[str, Path] = {}
    for file in files:
        if not file.is_relative_to(folder):
            raise UsageError(f"{file}: is not in {folder}")
        named[file.relative_to(folder).as_posix()] = file
    digest = hashlib.sha256(b"tpuport.fingerprint.1")
    for name in sorted(named):
        try:
            size, content = _fingerprint_file(named[name])
        except OSError as error:
            raise WeightsError(
                f"{named[name]}: cannot be read: {error.strerror}"
            ) from error
        # JSON delimits the three, so that no name can imitate a size.
        digest.update(_canonical([name, size, content]))
    return digest.hexdigest()


def _fingerprint_file(path: Path) -> tuple[int, str]:
    """The size of a file in bytes and the sha256 of its content or samples."""
    # Unbuffered: a buffer would read ahead at every sample.
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= FINGERPRINT_WHOLE_BYTES:
            return size, hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        inner = size - 2 * _EDGE_BYTES - _SAMPLE_BYTES
        middle = [
            (_EDGE_BYTES + inner * i // (_SAMPLES - 1), _SAMPLE_BYTES)
            for i in range(_SAMPLES)
        ]
        for offset, length in [
            (0, _EDGE_BYTES),
            *middle,
            (size - _EDGE_BYTES, _EDGE_BYTES),
        ]:
            file.seek(offset)
            while length > 0 and (data := file.read(length)):
                digest.update(data)
                length -= len(data)
        return size, digest.hexdigest()


def _hash_output(path: Path) -> tuple[str, int]:
    """The sha256 and the bytes of a video file, or of the frames in a PNG folder."""
    if not path.is_dir():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return digest.hexdigest(), os.fstat(file.fileno()).st_size
    frames = sorted(path.glob("*.png"))
    parts = [(frame.name, *_hash_output(frame)) for frame in frames]
    total = sum(size for _, _, size in parts)
    return hashlib.sha256(_canonical(parts)).hexdigest(), total


# --- the run directory


class RunDirectory:
    """A run directory whose ``run.json`` has been read and found intact.

    Every method reads ``run.json`` afresh, so that another process may have finished a
    stage in between, and checks it afresh. Writing is for one process at a time.
    """

    def __init__(self, path: Path) -> None:
        """Use :meth:`create`, :meth:`open` or :meth:`open_or_create` instead."""
        self.path = path
        # What this object has read or written, by file name: the inputs of the next
        # stage. Not looked up when that stage is written, because by then another
        # process may have replaced the file.
        self._seen: dict[str, tuple[str, str]] = {}

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        model: str,
        variant: str,
        settings: Mapping[str, Any],
        weights: Mapping[str, str | None],
    ) -> RunDirectory:
        """Start a run directory, making the folder and its parents where needed.

        Args:
            settings: what was asked for, as JSON; stages run later must ask the same.
            weights: component name to the fingerprint of its files, None if unknown.

        Raises:
            UsageError: ``settings`` or ``weights`` is not JSON.
            ArtifactError: the folder holds a run already, or tensors that no run.json
                accounts for, or cannot be written.
        """
        run = cls(Path(path))
        content = {
            "tpuport_version": _tpuport_version(),
            "created": _now(),
            "model": model,
            "variant": variant,
            "settings": _as_json(dict(settings), "settings"),
            "weights": _as_json(dict(weights), "weights"),
            "stages": {},
        }
        if run.file.exists():
            raise ArtifactError(
                f"{run.file}: already describes a run; choose another run directory"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "is not a folder" if run.path.exists() else error.strerror
            raise ArtifactError(
                f"{run.path}: cannot be made a run directory: {reason}"
            ) from error
        # A checkpoint folder given by mistake, or a run whose run.json was lost: the
        # stages would overwrite what is there.
        if strays := sorted(run.path.glob("*.safetensors")):
            raise ArtifactError(
                f"{strays[0]}: is there without a {RUN_FILE} to account for it; choose"
                " another run directory, or move the file away"
            )
        run._write(content)
        return run

    @classmethod
    def open(cls, path: Path, *, model: str | None = None) -> RunDirectory:
        """A run directory that exists.

        Args:
            model: if given, the run must be of that model.

        Raises:
            ArtifactError: the folder or its run.json is missing, not JSON, truncated,
                altered, of another schema or version, or of another model.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            what = "is not a folder" if run.path.exists() else "does not exist"
            raise ArtifactError(
                f"{run.path}: the run directory {what}; {run._rerun('encode')} first"
            )
        run._read()
        if model is not None:
            run.check_request(model=model)
        return run

    @classmethod
    def open_or_create(
        cls,
        path: Path,
        *,
        model: str,
        variant: str,
        settings: Mapping[str, Any],
        weights: Mapping[str, str | None],
    ) -> RunDirectory:
        """:meth:`open` and check everything asked for, or :meth:`create`.

        Raises:
            UsageError, ArtifactError: as those two, :meth:`check_request` and
                :meth:`check_weights` do.
        """
        if not (Path(path) / RUN_FILE).exists():
            return cls.create(
                path, model=model, variant=variant, settings=settings, weights=weights
            )
        run = cls.open(path)
        run.check_request(model=model, variant=variant, settings=settings)
        for component, fingerprint in weights.items():
            run.check_weights(component, fingerprint)
        return run

    # --- what the run is

    @property
    def file(self) -> Path:
        """The path of ``run.json``."""
        return self.path / RUN_FILE

    @property
    def model(self) -> str:
        """The model the run is of."""
        return self._read()["model"]

    @property
    def variant(self) -> str:
        """The variant of the model."""
        return self._read()["variant"]

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for when the run was created; a copy."""
        return self._read()["settings"]

    @property
    def weights(self) -> dict[str, str | None]:
        """Component name to fingerprint, None where unknown; a copy."""
        return self._read()["weights"]

    def report(self, stage: str) -> dict[str, Any]:
        """The report recorded with a stage.

        Raises:
            ArtifactError: the stage is not finished.
        """
        return self._entry(self._read(), stage)["report"]

    def settings_digest(self) -> str:
        """64 hexadecimal digits over model, variant and settings.

        6 and 6.0 are one value; the order of the keys does not matter.
        """
        run = self._read()
        asked = [run["model"], run["variant"], _plain_numbers(run["settings"])]
        return hashlib.sha256(_canonical(asked)).hexdigest()

    def check_request(
        self,
        *,
        model: str,
        variant: str | None = None,
        settings: Mapping[str, Any] | None = None,
        subset: bool = False,
    ) -> None:
        """Check that a request is the one this run was created for.

        Args:
            variant, settings: not compared when None.
            subset: ``settings`` are only those given explicitly; others may have any
                value. Otherwise a setting missing on either side is a difference.

        Raises:
            UsageError: ``settings`` is not JSON.
            ArtifactError: they differ; the message lists every difference.
        """
        run = self._read()
        asked: dict[str, Any] = {"model": model}
        found: dict[str, Any] = {"model": run["model"]}
        if variant is not None:
            asked["variant"], found["variant"] = variant, run["variant"]
        if settings is not None:
            wanted = _flatten(_as_json(dict(settings), "settings"))
            recorded = _flatten(run["settings"])
            if subset:
                recorded = {k: v for k, v in recorded.items() if k in wanted}
            asked |= wanted
            found |= recorded
        differences = [
            f"{key} is {_difference(found, asked, key)}, asked"
            f" {_difference(asked, found, key)}"
            for key in sorted(asked.keys() | found.keys(), key=_model_first)
            if (key in asked) != (key in found)
            or _canonical(_plain_numbers(asked[key]))
            != _canonical(_plain_numbers(found[key]))
        ]
        if differences:
            raise ArtifactError(
                f"{self.file}: is of another request: {'; '.join(differences)}; ask for"
                " what the run was created with, or use another run directory"
            )

    def check_weights(self, component: str, fingerprint: str | None) -> None:
        """Check a component's weights against the recorded fingerprint.

        Records the fingerprint when none was recorded. None says nothing and passes.

        Raises:
            ArtifactError: another fingerprint is recorded.
        """
        if fingerprint is None:
            return
        run = self._read()
        recorded = run["weights"].get(component)
        if recorded is None:
            run["weights"][component] = fingerprint
            self._write(run)
        elif recorded != fingerprint:
            raise ArtifactError(
                f"{self.file}: was made with other weights for {component}: recorded"
                f" {recorded[:16]}, given {fingerprint[:16]}; give the same checkpoint,"
                " or use another run directory"
            )

    # --- stages

    def write_stage(
        self,
        stage: str,
        filename: str,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        report: Mapping[str, Any],
    ) -> None:
        """Write a stage's tensors, then its entry in run.json.

        The entry records as the stage's inputs the files of earlier stages that this
        object has read or written. When anything fails, the stage is what it was.

        Raises:
            UsageError: ``filename`` is not a plain name of its own, or ``report`` is
                not JSON.
            ArtifactError: the tensors are not those of ``specs``, or a file cannot be
                written.
        """
        run = self._read()
        reserved = ("", "..", RUN_FILE)
        if filename in reserved or PurePosixPath(filename).name != filename:
            raise UsageError(f"{filename!r} cannot be the file of a stage")
        for other, entry in run["stages"].items():
            if other != stage and entry["file"] == filename:
                raise UsageError(f"{filename!r} is the file of the stage {other}")
        clean_report = _as_json(dict(report), f"the report of {stage}")
        path = self.path / filename
        save_tensors(path, tensors, specs)
        sha256, size = _hash_output(path)
        listing = {
            name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
            for name, tensor in tensors.items()
        }
        self._record(
            run,
            stage,
            {"file": filename, "sha256": sha256, "bytes": size, "tensors": listing},
            clean_report,
        )
        self._seen[filename] = (stage, sha256)

    def read_stage(
        self, stage: str, specs: Sequence[TensorSpec]
    ) -> dict[str, torch.Tensor]:
        """The tensors of a finished stage, on the CPU, dtypes as written.

        Optional tensors that the file lacks are left out.

        Raises:
            ArtifactError: the stage is not finished; its file is missing, truncated,
                altered or unreadable; its tensors are not those of ``specs``; or it was
                made from inputs that have since been replaced.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        run = self._read()
        entry = self._entry(run, stage)
        self._check_inputs(run, stage)
        path = self.path / entry["file"]
        # One read for both: the bytes that were checked are the bytes that are used.
        data = self._verified(path, entry, stage)
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ArtifactError(
                f"{path}: is not a safetensors file ({_one_line(error)});"
                f" {self._rerun(stage)} again"
            ) from error
        check_tensors(path, tensors, specs)
        self._seen[entry["file"]] = (stage, entry["sha256"])
        return {spec.name: tensors[spec.name] for spec in specs if spec.name in tensors}

    def record_output(
        self, stage: str, path: Path | Sequence[Path], report: Mapping[str, Any]
    ) -> None:
        """Record the video that a stage wrote: a file, a folder of PNGs, or several.

        A path inside the run directory is recorded relative to it. Of one outside only
        the name is, since the run directory may move; such a file is not checked later.

        Raises:
            UsageError: there is no path, or ``report`` is not JSON.
            ArtifactError: a path is missing, or run.json cannot be written.
        """
        paths = [path] if isinstance(path, Path) else list(path)
        if not paths:
            raise UsageError(f"the stage {stage} has no output to record")
        run = self._read()
        clean_report = _as_json(dict(report), f"the report of {stage}")
        files = [self._describe(output) for output in paths]
        entry = {**files[0], "tensors": {}}
        if files[1:]:
            entry["others"] = files[1:]
        self._record(run, stage, entry, clean_report)

    def finished(self, stage: str) -> bool:
        """Whether a stage's result is there, intact, and made from current inputs.

        Raises:
            ArtifactError: run.json itself is not usable.
        """
        run = self._read()
        if stage not in run["stages"]:
            return False
        entry = run["stages"][stage]
        try:
            self._check_inputs(run, stage)
        except ArtifactError:
            return False
        return all(
            self._intact(file)
            for file in [entry, *entry.get("others", [])]
            if not file.get("outside")
        )

    def invalidate_after(
        self, stage: str, order: Sequence[str] = STAGES
    ) -> tuple[str, ...]:
        """Forget the stages after ``stage`` in ``order``; returns those forgotten.

        Their files stay where they are and are no longer used.

        Raises:
            UsageError: ``stage`` is not in ``order``.
            ArtifactError: run.json is not usable or cannot be written.
        """
        if stage not in order:
            raise UsageError(f"there is no stage {stage!r} among {', '.join(order)}")
        run = self._read()
        later = order[list(order).index(stage) + 1 :]
        dropped = tuple(name for name in later if name in run["stages"])
        for name in dropped:
            del run["stages"][name]
        if dropped:
            self._write(run)
        return dropped

    # --- inside

    def _rerun(self, stage: str) -> str:
        return f"run `tpuport {stage} --run-dir {shlex.quote(str(self.path))}`"

    def _read(self) -> dict[str, Any]:
        run = _read_document(self.file, RUN_SCHEMA, _START_OVER)
        if problem := _malformed(run):
            raise ArtifactError(f"{self.file}: {problem}; {_START_OVER}")
        return run

    def _write(self, content: Mapping[str, Any]) -> None:
        _write_document(self.file, RUN_SCHEMA, content)

    def _record(
        self,
        run: dict[str, Any],
        stage: str,
        entry: dict[str, Any],
        report: dict[str, Any],
    ) -> None:
        earlier = STAGES[: STAGES.index(stage)] if stage in STAGES else None
        inputs = {
            name: sha256
            for name, (made_by, sha256) in sorted(self._seen.items())
            if made_by != stage and (earlier is None or made_by in earlier)
        }
        run["stages"][stage] = {
            **entry,
            "inputs": inputs,
            "finished": _now(),
            "report": report,
        }
        self._write(run)

    def _entry(self, run: Mapping[str, Any], stage: str) -> dict[str, Any]:
        if stage not in run["stages"]:
            name = STAGE_FILES.get(stage, RUN_FILE)
            raise ArtifactError(
                f"{self.path / name}: the stage {stage} is not finished;"
                f" {self._rerun(stage)} first"
            )
        return run["stages"][stage]

    def _check_inputs(self, run: Mapping[str, Any], stage: str) -> None:
        """Check that the files a stage was made from are still the recorded ones."""
        current = {entry["file"]: name for name, entry in run["stages"].items()}
        todo, checked = [stage], {stage}
        while todo:
            name = todo.pop()
            entry = run["stages"][name]
            for file, sha256 in entry["inputs"].items():
                source = current.get(file)
                if source is None or run["stages"][source]["sha256"] != sha256:
                    raise ArtifactError(
                        f"{self.path / entry['file']}: was made from another {file}"
                        f" than {RUN_FILE} records now; {self._rerun(name)} again"
                    )
                if source not in checked:
                    checked.add(source)
                    todo.append(source)

    def _verified(self, path: Path, entry: Mapping[str, Any], stage: str) -> bytes:
        """The bytes of a stage's file, found to be the recorded ones."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ArtifactError(
                f"{path}: is missing; {self._rerun(stage)} first"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        if len(data) != entry["bytes"]:
            what = "is cut short" if len(data) < entry["bytes"] else "has grown"
            raise ArtifactError(
                f"{path}: {what}: {len(data)} bytes, {RUN_FILE} records"
                f" {entry['bytes']}; copy it again, or {self._rerun(stage)} again"
            )
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ArtifactError(
                f"{path}: is not the file {RUN_FILE} records (its sha256 differs); copy"
                f" it again, or {self._rerun(stage)} again"
            )
        return data

    def _describe(self, path: Path) -> dict[str, Any]:
        try:
            sha256, size = _hash_output(path)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        entry: dict[str, Any] = {"file": path.name, "sha256": sha256, "bytes": size}
        inside, real = self.path.resolve(), path.resolve()
        if real.is_relative_to(inside):
            entry["file"] = real.relative_to(inside).as_posix()
        else:
            entry["outside"] = True
        return entry

    def _intact(self, entry: Mapping[str, Any]) -> bool:
        try:
            found = _hash_output(self.path / entry["file"])
        except OSError:
            return False
        return found == (entry["sha256"], entry["bytes"])


def _malformed(run: Mapping[str, Any]) -> str:
    """What a run.json with a good checksum lacks, or ""."""
    top: dict[str, type] = {"model": str, "variant": str, "settings": dict}
    for key, kind in {**top, "weights": dict, "stages": dict}.items():
        if not isinstance(run.get(key), kind):
            return f"has no usable {key}"
    kinds: dict[str, type] = {"file": str, "sha256": str, "bytes": int}
    kinds |= {"inputs": dict, "report": dict}
    for stage, entry in run["stages"].items():
        if not isinstance(entry, dict):
            return f"has no usable entry for the stage {stage}"
        for key, kind in kinds.items():
            if not isinstance(entry.get(key), kind):
                return f"has no usable {key} for the stage {stage}"
        for file in [entry, *entry.get("others", [])]:
            name = PurePosixPath(file["file"])
            # Nothing writes such a name; reading through one could reach any file.
            if name.is_absolute() or ".." in name.parts:
                return f"names a file outside the run directory, {file['file']!r}"
    return ""


def _now() -> str:
    """The time in UTC, such as ``2025-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _tpuport_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tpuport")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _plain_numbers(value: Any) -> Any:
    """``value`` with 6.0 written as 6, so that the two compare equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    return value


def _flatten(settings: Mapping[str, Any], prefix: str = "settings.") -> dict[str, Any]:
    """Nested settings as one level of dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _model_first(key: str) -> tuple[bool, str]:
    return key.startswith("settings."), key


def _difference(here: Mapping[str, Any], there: Mapping[str, Any], key: str) -> str:
    """One side of a difference; a long value is cut to where it starts to differ."""
    if key not in here:
        return "not set"
    text, other = _show(here[key]), _show(there.get(key))
    if len(text) <= 60:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    start = max(0, same - 20)
    end = start + 60
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
