"""From a pixel of an autoencoder's latents to a colour: a linear fit.

The autoencoder itself gives the pairs: smooth pictures of random colours, encoded, and
the mean colour of the pixels that each latent pixel becomes when it is decoded. That
runs on the host, on pictures of some latent pixels, and the fit is kept in a file.

Letters: B videos, C channels, T frames, Y rows, X columns; small ones are of latents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import TypedDict

from tpuport.core.files.atomic import one_line
from tpuport.core.files.frames import to_uint8
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.typed import checked
from tpuport.core.preview.decode_input import DecodeInput, NoPreviewError
from tpuport.core.programs.program_key import config_of
from tpuport.core.seam.ported import upstreams_twin
from tpuport.core.seam.values import tensors_in
from tpuport.errors import ArtifactError

_SCHEMA = "tpuport.latent-colours"
_REMEDY = "remove the file"
#: Rows and columns of latents in a picture of the fit, at most.
_SIDE = 8
#: Frames of latents in a picture, at most: the first one may stand for fewer.
_FRAMES = 2
#: Latent pixels for each channel, and pictures, at least.
_PIXELS, _PICTURES = 8, 4

#: Numbers of each weight that tell it apart, about.
_TAKEN = 4096


class _Fit(TypedDict):
    """The content of a file: a row of red, green and blue for each channel, and 1."""

    weights: list[list[float]]


class LatentColours:
    """The colours of latent pixels.

    Args:
        weights: [c + 1, 3]: of each channel, and of 1; colours are in [0, 1].
    """

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights

    def frames(self, latents: torch.Tensor) -> np.ndarray:
        """uint8 frames [B * t, y, x, 3] of latents [B, c, t, y, x] or [B, c, y, x]."""
        colours = _rows(latents.detach().float()) @ self.weights
        return to_uint8(colours.reshape(-1, *colours.shape[-3:]))

    @classmethod
    def of(
        cls,
        decode: DecodeInput,
        folder: Path | None = None,
    ) -> LatentColours:
        """The colours of what an autoencoder is given to decode.

        Args:
            folder: where the fit is kept; without one it is computed.

        Raises:
            NoPreviewError: what is decoded are no pictures.
        """
        if folder is None:
            return cls(_fitted(decode))
        file = folder / f"{_digest(decode)}.json"
        # A file that is damaged is made again.
        with contextlib.suppress(ArtifactError, ValueError):
            found = checked(_Fit, read_document(file, _SCHEMA, _REMEDY), file, _REMEDY)
            weights = np.asarray(found["weights"], np.float32)
            if weights.shape == (decode.latents.shape[1] + 1, 3):
                return cls(weights)
        weights = _fitted(decode)
        folder.mkdir(parents=True, exist_ok=True)
        write_document(file, _SCHEMA, {"weights": weights.tolist()})
        return cls(weights)


def _digest(decode: DecodeInput) -> str:
    """A name for an autoencoder: its class, its config and some of each weight."""
    module = decode.module
    about: list[Any] = [type(module).__name__, config_of(module)]
    for name, tensor in module.state_dict().items():
        flat = tensor.detach().reshape(-1)
        taken = flat[:: max(1, len(flat) // _TAKEN)].contiguous()
        data = taken.view(torch.uint8)
        about.append([name, str(tensor.dtype), zlib.crc32(data.numpy())])
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _fitted(decode: DecodeInput) -> np.ndarray:
    """The weights of the fit [c + 1, 3]."""
    try:
        # Decoders may draw noise, which the run must not miss.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            pairs = _pairs(decode)
    except NoPreviewError:
        raise
    except Exception as error:  # of upstream's code
        raise NoPreviewError(
            f"{decode.name} decodes no small picture: {one_line(error)}"
        ) from error
    rows, colours = (np.concatenate(each) for each in zip(*pairs, strict=True))
    weights: np.ndarray = np.linalg.lstsq(rows, colours, rcond=1e-4)[0]
    if not np.isfinite(weights).all():
        raise NoPreviewError(f"{decode.name} has weights that are not finite")
    return weights.astype(np.float32)


def _pairs(decode: DecodeInput) -> list[tuple[np.ndarray, np.ndarray]]:
    """Latent pixels [n, c + 1] and their colours [n, 3]."""
    twin, shape = upstreams_twin(decode.module), decode.latents.shape
    if len(shape) not in (4, 5):
        raise NoPreviewError(
            f"{decode.name} decodes {list(shape)}, which are no pictures"
        )
    small = [*shape[:2], *(min(n, _FRAMES) for n in shape[2:-2])]
    small += [min(n, _SIDE) for n in shape[-2:]]
    generator = torch.Generator("cpu").manual_seed(0)
    needed = _PIXELS * (shape[1] + 1)
    latents = torch.randn(small, generator=generator)
    pixels = _pixels(decode.decoded(twin, latents))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    while count < needed or len(found) < _PICTURES:
        latents = _encoded(twin, pixels.shape, small, generator)
        pixels = _pixels(decode.decoded(twin, latents))
        rows = _rows(latents)
        found.append((rows.reshape(-1, rows.shape[-1]), _means(pixels, small)))
        count += len(found[-1][0])
    return found


def _encoded(
    twin: Any, pixels: torch.Size, small: list[int], generator: torch.Generator
) -> torch.Tensor:
    """Latents of a smooth picture; without an encoder, random ones."""
    if hasattr(twin, "encode") and getattr(twin, "encoder", None) is not None:
        size = [*pixels[:2], *(min(3, n) for n in pixels[2:])]
        colours = 2 * torch.rand(size, generator=generator) - 1
        mode = "trilinear" if len(pixels) == 5 else "bilinear"
        smooth = torch.nn.functional.interpolate(
            colours, tuple(pixels[2:]), mode=mode, align_corners=True
        )
        answer = twin.encode(smooth)
        told = getattr(answer, "latent_dist", None)
        found = told.mode() if told is not None else tensors_in(answer)[0]
        if list(found.shape) == small:
            return torch.as_tensor(found)
    return torch.randn(small, generator=generator)


def _rows(latents: torch.Tensor) -> np.ndarray:
    """Latents as [B, t, y, x, c + 1], with 1 at the end."""
    if latents.ndim == 4:
        latents = latents[:, :, None]
    last = latents.movedim(1, -1)
    return torch.cat([last, torch.ones_like(last[..., :1])], -1).numpy()


def _pixels(decoded: torch.Tensor) -> torch.Tensor:
    """What was decoded, as [B, 3, T, Y, X] or [B, 3, Y, X]; some have T before 3."""
    turned = decoded.ndim == 5 and decoded.shape[1] != 3
    pixels = decoded.transpose(1, 2) if turned else decoded
    if pixels.shape[1] != 3:
        raise NoPreviewError(f"decoded {list(decoded.shape)} are no pictures")
    return pixels


def _means(decoded: torch.Tensor, small: list[int]) -> np.ndarray:
    """The mean colours [n, 3], in [0, 1], of the pixels of each latent pixel."""
    pixels = decoded if decoded.ndim == 5 else decoded[:, :, None]
    (videos, _, frames), size = pixels.shape[:3], pixels.shape[3:]
    sides = [whole // part for whole, part in zip(size, small[-2:], strict=True)]
    exact = [side * part for side, part in zip(sides, small[-2:], strict=True)]
    if videos != small[0] or list(size) != exact:
        raise NoPreviewError(f"{list(decoded.shape)} of {small} are no pictures")
    times = small[2] if len(small) == 5 else 1
    if frames % times == 0:
        lengths = [frames // times] * times
    elif (frames - 1) % (times - 1) == 0:  # the first one stands for one frame
        lengths = [1] + [(frames - 1) // (times - 1)] * (times - 1)
    else:
        raise NoPreviewError(f"{frames} frames do not go with {times} of latents")
    parts = pixels.split(lengths, 2)
    each = torch.stack([part.mean(2) for part in parts], 1)  # [B, t, 3, Y, X]
    pooled = torch.nn.functional.avg_pool2d(each.flatten(0, 1), sides)
    colours: np.ndarray = (pooled / 2 + 0.5).clamp(0, 1).movedim(1, -1).numpy()
    return colours.reshape(-1, 3)
