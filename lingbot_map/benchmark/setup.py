"""
Build the engines and input images of a measurement.

`host_weights` loads weights into host memory; `build` makes a warm engine from them and measures
how long that takes. `noise` and `room` return the images to run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
import gc
import time

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.config import MODEL_PRESETS
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
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
_DISTINCT = 64  # noise images, then they repeat: a new one takes longer than the network
_ROOM_SEED = 10_000
_ROOM_STEP = (0.022, 0.032)  # [m] between frames, as for a handheld camera at 10 Hz


@dataclass(frozen=True)
class Setup:
    """Settings of an engine; names and values are those of the command line."""

    model: str
    weights: str  # 'random', 'recipe', a file, or '' (packaged)
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
        """Return how the model runs; UserError: it cannot run like that on the device."""
        return compiling.resolve(
            self.compile_mode, self.attention_backend, Device.of(self.device), self.trunk_dtype
        )

    def stream_config(self) -> StreamConfig:
        """Return the engine's settings; raise UserError if they are inconsistent."""
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
    """A warm engine and the time to READY, counted from weights in host memory."""

    engine: StreamEngine
    ready_s: float
    compile_mode: str  # in use, after resolving `auto` and any fallback
    attention_backend: str

    def label(self, mode: str) -> str:
        """Return a label with the requested `mode`, the mode in use and the backend."""
        became = mode if mode == self.compile_mode else f'{mode} -> {self.compile_mode}'
        return f'{became}, {self.attention_backend}'


def host_weights(setup: Setup) -> dict[str, Tensor]:
    """Load the weights into host memory; raise CheckpointError if they cannot be used."""
    if setup.weights == 'random':  # generated on the device: takes a minute on a CPU
        state = load_model(setup.model, 'random', setup.device).state_dict()
        return {key: value.cpu() for key, value in state.items()}
    if setup.weights == 'recipe':
        model = _empty_model(setup.model)
        fill_model(model)
        return model.state_dict()
    state = read_state(resolve(setup.model, setup.weights))
    return {key: value.clone() for key, value in state.items()}  # not memory-mapped


def build(setup: Setup, weights: dict[str, Tensor]) -> Ready:
    """Return a warm engine with these weights; raise UserError for unsupported settings."""
    release(setup.device)
    start_s = time.perf_counter()
    model = _empty_model(setup.model)
    load_weights(model, weights, setup.weights)
    model.to(setup.device).float()
    set_trunk_dtype(model, setup.trunk_dtype)
    set_heads_dtype(model, setup.heads_dtype)
    model.eval().requires_grad_(False)
    compile_model(model, setup.execution())
    engine = StreamEngine(model, setup.stream_config(), setup.device)
    engine.warm_up(setup.image_height, setup.image_width)
    synchronize(setup.device)
    ready_s = time.perf_counter() - start_s
    return Ready(engine, ready_s, model.compile_mode, model.attention_backend)


def release(device: torch.device) -> None:
    """Drop compiled code and cached memory, so that the next engine starts clean."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.init()  # the memory statistics exist only after this
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def _empty_model(name: str) -> GCTStream:
    with torch.device('meta'):
        return GCTStream.from_config(MODEL_PRESETS[name])


def noise(setup: Setup, count: int) -> Iterator[np.ndarray]:
    """Yield random images (H, W, 3) uint8 of the network's input size."""
    shape = (min(count, _DISTINCT), setup.image_height, setup.image_width, 3)
    frames = np.random.default_rng(_SEED).integers(0, 256, shape, dtype=np.uint8)
    for i in range(count):
        yield frames[i % _DISTINCT]


def room(setup: Setup, count: int) -> np.ndarray:
    """Return images (N, H, W, 3) uint8 of a walk through a room, rendered on the CPU."""
    config = RoomConfig(setup.image_width, setup.image_height, count, _ROOM_STEP)
    rgb = render_clips([_ROOM_SEED], config, 'cpu').rgb[0]
    return rgb.permute(0, 2, 3, 1).contiguous().numpy()
