"""Engines for measurements: weights in host memory first, then as fast as possible to READY."""

from collections.abc import Iterator
from dataclasses import dataclass
import gc
import time

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS, StreamConfig
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.streaming import compiling
from lingbot_map.streaming.checkpoint import (
    default_dtype,
    load_model,
    load_weights,
    read_state,
    resolve,
    set_heads_dtype,
    set_trunk_dtype,
)
from lingbot_map.streaming.compiling import compile_model, Device, Execution
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.synthetic.rendering import render_clips
from lingbot_map.synthetic.rooms import RoomConfig
import numpy as np
import torch
from torch import Tensor

_SEED = 42
_DIFFERENT = 64  # noise frames, then they repeat: drawing them anew would take longer than a frame
_ROOM = 10_000
_ROOM_STEP = (0.022, 0.032)  # [m] between frames, as of a camera that is carried at 10 Hz


class SetupError(ValueError):
    """Settings that do not go together, or not on this machine."""


@dataclass(frozen=True)
class Setup:
    """What an engine is made of; names and values are those of the command line."""

    model: str
    weights: str  # random, recipe, a file, or '' for the packaged ones
    image_width: int
    image_height: int
    num_scale_frames: int
    sliding_window: int
    keyframe_interval: int
    max_keyframes: int
    on_limit: str
    compile_mode: str
    attention_backend: str
    dtype: str
    heads_dtype: str
    device: torch.device

    @property
    def trunk_dtype(self) -> torch.dtype:
        if self.dtype == 'auto':
            return default_dtype(self.device)
        return getattr(torch, self.dtype)

    def execution(self) -> Execution:
        """Return how the model runs; ValueError: it cannot run like that on the device."""
        return compiling.resolve(
            self.compile_mode, self.attention_backend, Device.of(self.device), self.trunk_dtype
        )

    def stream_config(self) -> StreamConfig:
        """Return the settings of the engine; ValueError: they do not go together."""
        return StreamConfig(
            num_scale_frames=self.num_scale_frames,
            sliding_window=self.sliding_window,
            max_keyframes=self.max_keyframes,
            on_limit=self.on_limit,
            keyframe_interval=self.keyframe_interval,
            image_width=self.image_width,
        )


@dataclass(frozen=True)
class Ready:
    """An engine that is warm, and how long that took from weights in host memory."""

    engine: StreamEngine
    ready_s: float
    compile_mode: str  # what `auto` came to, and what was left after a fallback
    attention_backend: str

    def label(self, mode: str) -> str:
        """Return how to call it where `mode` was asked for."""
        became = mode if mode == self.compile_mode else f'{mode} -> {self.compile_mode}'
        return f'{became}, {self.attention_backend}'


def host_weights(setup: Setup) -> dict[str, Tensor]:
    """Return the weights in host memory; CheckpointError: they cannot be used."""
    if setup.weights == 'random':  # drawn on the device, since that takes a minute on a CPU
        state = load_model(setup.model, 'random', setup.device).state_dict()
        return {key: value.cpu() for key, value in state.items()}
    if setup.weights == 'recipe':
        model = _empty_model(setup.model)
        fill_model(model)
        return model.state_dict()
    state = read_state(resolve(setup.model, setup.weights))
    return {key: value.clone() for key, value in state.items()}  # no longer on disk


def build(setup: Setup, weights: dict[str, Tensor]) -> Ready:
    """Return an engine with these weights, warm for the frames; SetupError: it cannot be."""
    release(setup.device)
    start_s = time.perf_counter()
    model = _empty_model(setup.model)
    load_weights(model, weights, setup.weights)
    model.to(setup.device).float()
    set_trunk_dtype(model, setup.trunk_dtype)
    set_heads_dtype(model, setup.heads_dtype)
    model.eval().requires_grad_(False)
    try:
        compile_model(model, setup.execution())
    except ValueError as error:
        raise SetupError(str(error)) from error
    engine = StreamEngine(model, setup.stream_config(), setup.device)
    engine.warm_up(setup.image_height, setup.image_width)
    synchronize(setup.device)
    ready_s = time.perf_counter() - start_s
    return Ready(engine, ready_s, model.compile_mode, model.attention_backend)


def release(device: torch.device) -> None:
    """Forget compiled code and give memory back, so that the next engine starts afresh."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.init()  # or there are no statistics to reset yet
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _empty_model(name: str) -> GCTStream:
    with torch.device('meta'):
        return GCTStream.from_config(MODEL_PRESETS[name])


def noise(setup: Setup, count: int) -> Iterator[np.ndarray]:
    """Yield images (H, W, 3) uint8 of the size of the network's input."""
    shape = (min(count, _DIFFERENT), setup.image_height, setup.image_width, 3)
    frames = np.random.default_rng(_SEED).integers(0, 256, shape, dtype=np.uint8)
    for i in range(count):
        yield frames[i % _DIFFERENT]


def room(setup: Setup, count: int) -> np.ndarray:
    """Return images (N, H, W, 3) uint8 of a walk through a room, drawn on the CPU."""
    config = RoomConfig(setup.image_width, setup.image_height, count, _ROOM_STEP)
    rgb = render_clips([_ROOM], config, 'cpu').rgb[0]
    return rgb.permute(0, 2, 3, 1).contiguous().numpy()
