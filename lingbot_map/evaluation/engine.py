"""Load the engine of an evaluation, and describe it for run.yaml."""

from __future__ import annotations

from dataclasses import dataclass
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
import platform

from lingbot_map.settings import build, EngineSettings, network_width
from lingbot_map.streaming.checkpoint import default_dtype, resolve
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.loading import choose_device, load_engine
import torch

_PACKAGES = ('lingbot_map_ros', 'torch', 'numpy', 'pillow', 'rosbags', 'opencv-python-headless')
_INTERVAL = 'keyframe_interval'  # may be 0 here; the engine's is set for each recording


@dataclass(frozen=True)
class Loaded:
    """An engine and the part of run.yaml that describes it."""

    engine: StreamEngine
    device: torch.device
    resolved: dict[str, object]  # settings whose value depends on the machine or the model
    weights_sha256: str


def load(settings: dict) -> Loaded:
    """Load the network; raises the errors of `load_engine`."""
    values = {name: value for name, value in settings.items() if name != _INTERVAL}
    params = build(EngineSettings, values)
    device = choose_device(params.device)
    dtype = default_dtype(device) if params.dtype == 'auto' else getattr(torch, params.dtype)
    engine = load_engine(params)
    resolved = {
        'device': str(device),
        'dtype': str(dtype).removeprefix('torch.'),
        'image_width': network_width(params),
    }
    if Path(params.checkpoint).is_file():
        resolved['checkpoint'] = str(Path(params.checkpoint).resolve())
    return Loaded(engine, device, resolved, _weights_hash(params.model, params.checkpoint))


def versions() -> dict[str, str]:
    """Return the versions that can change the last bits of the results."""
    found = {'python': platform.python_version(), 'machine': platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # installed without metadata
            found[package] = 'unknown'
    found['cuda'] = torch.version.cuda or 'none'
    return found


def _weights_hash(model: str, checkpoint: str) -> str:
    if checkpoint == 'random':
        return 'random, seed 0'
    digest = hashlib.sha256()
    with open(resolve(model, checkpoint), 'rb') as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
