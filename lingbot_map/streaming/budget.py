"""
What a stream takes of the memory of its device, computed before the first frame.

Weights, cached keys and values, and the next window are exact. What the network needs while it
runs follows a formula whose factors `Calibration` holds.
"""

from dataclasses import dataclass, replace
from math import prod

from lingbot_map.config import MODEL_PRESETS, StreamConfig
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.memory import MemoryShape
from lingbot_map.streaming.checkpoint import set_heads_dtype, set_trunk_dtype
from lingbot_map.streaming.preprocess import crop_map
import torch

GB = 1e9
_FLOAT32 = 4  # bytes
# Modes in which graphs keep the memory of their passes, beside that of passes without a graph.
_GRAPH_MODES = ('cuda-graph', 'reduce-overhead', 'max-autotune')


@dataclass(frozen=True)
class Calibration:
    """
    How much memory a pass of the network needs, beside weights and caches.

    The factors count the tensors of an eager pass that are alive at its peak; test_memory_budget
    counts them again, without a device. `workspace` is what the peak measured on CUDA
    (`pytest -m cuda test/test_memory_budget.py` prints it) has beyond all that: work space of
    matrix products and convolutions, and rounding by the allocator.
    """

    trunk_values: float = 13.0  # in the trunk's precision, per token and channel, in a block
    trunk_floats: float = 3.0  # float32, per token and channel, in a block
    head_floats_per_feature: float = 1.11  # per pixel and feature of the frames decoded together
    head_floats: float = 64.0  # per pixel of the same frames
    head_floats_once: float = 0.5  # per pixel and feature, however many frames
    image_floats: float = 6.0  # per pixel of all frames: inputs and outputs
    workspace: float = 0.07e9  # bytes


CALIBRATION = Calibration()


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes in bytes; `size` is (width, height) of the network's input [px]."""

    size: tuple[int, int]
    tokens: int  # per frame
    weights: int
    cache: int  # keys and values of the trunk
    camera_cache: int  # those of the camera head
    next_window: int  # what a roll-over prepares: caches, images and depths of the overlap
    working: int  # while the network runs

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        parts = (self.weights, self.cache, self.camera_cache, self.next_window, self.working)
        return sum(parts)

    def rows(self) -> list[tuple[str, int]]:
        """Return what the total consists of, with names."""
        return [
            ('weights', self.weights),
            ('key-value cache', self.cache),
            ("camera head's cache", self.camera_cache),
            ('next window', self.next_window),
            ('working memory', self.working),
        ]

    def __str__(self) -> str:
        parts = ', '.join(f'{name} {size / GB:.2f}' for name, size in self.rows())
        width, height = self.size
        return (
            f'{width}x{height} pixels ({self.tokens} tokens per frame) need '
            f'{self.total / GB:.2f} GB: {parts}'
        )


def blank_model(
    name: str, dtype: torch.dtype, heads_dtype: str = 'tf32', compile_mode: str = 'off'
) -> GCTStream:
    """
    Return the preset `name` without any memory behind its weights, to be asked for sizes only.

    `heads_dtype` is one of config.HEADS_DTYPES, `compile_mode` as `compiling.resolve_mode` says.
    """
    with torch.device('meta'):
        model = GCTStream.from_config(MODEL_PRESETS[name])
    set_trunk_dtype(model, dtype)
    set_heads_dtype(model, heads_dtype)
    model.compile_mode = compile_mode
    return model


def predict(model: GCTStream, config: StreamConfig, height: int, width: int) -> MemoryBudget:
    """
    Return what a StreamEngine with `model` needs for images of `height` x `width`.

    The weights of `model` may be on any device, also on 'meta'.

    :raises ValueError: an image too wide for the network, or a width of it that is not whole.
    """
    patch = model.patch_size
    if config.image_width % patch:
        raise ValueError(
            f"'image_width' is {config.image_width}; "
            f'it must be a multiple of the patch size {patch}'
        )
    size = crop_map(width, height, config.image_width, patch).network_size
    patches = (size[0] // patch) * (size[1] // patch)
    dtype = model.aggregator.dtype
    shape = _shape(model, config, patches, config.max_keyframes)
    cache, camera_cache = _cache_bytes(shape, dtype)
    return MemoryBudget(
        size=size,
        tokens=patches + shape.specials,
        weights=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        cache=cache,
        camera_cache=camera_cache,
        next_window=_next_window_bytes(model, config, patches, dtype),
        working=round(_working_bytes(model, config.num_scale_frames, patches)),
    )


def _shape(model: GCTStream, config: StreamConfig, patches: int, keyframes: int) -> MemoryShape:
    return replace(
        model.memory_shape(patches, keyframes),
        anchors=config.num_scale_frames,
        window=config.sliding_window,
    )


def _cache_bytes(shape: MemoryShape, dtype: torch.dtype) -> tuple[int, int]:
    """Return the sizes of keys and values of trunk and camera head in a StreamMemory."""
    trunk, camera = prod(shape.trunk_buffer), prod(shape.camera_buffer)
    return 2 * trunk * dtype.itemsize, 2 * camera * _FLOAT32


def _next_window_bytes(
    model: GCTStream, config: StreamConfig, patches: int, dtype: torch.dtype
) -> int:
    """Return what a `NextWindow` holds at most; nothing without roll-over."""
    if config.on_limit != 'roll_over':
        return 0
    overlap, pixels = config.overlap_keyframes, patches * model.patch_size**2
    images = 3 * pixels * min(config.num_scale_frames, overlap)
    depths = 2 * overlap * pixels * _FLOAT32
    return sum(_cache_bytes(_shape(model, config, patches, overlap), dtype)) + images + depths


def _working_bytes(model: GCTStream, frames: int, patches: int) -> float:
    """Return what the pass over the scale batch, the largest, needs at its peak."""
    pass_bytes = _pass_bytes(model, frames, patches)
    kept_by_graphs = pass_bytes if model.compile_mode in _GRAPH_MODES else 0
    return pass_bytes + kept_by_graphs + CALIBRATION.workspace


def _pass_bytes(model: GCTStream, frames: int, patches: int) -> float:
    c, trunk, head = CALIBRATION, model.aggregator, model.depth_head
    channels = (patches + trunk.patch_start_idx) * trunk.camera_token.shape[-1]
    selected = frames * channels * 2 * len(trunk.selected_layers) * _FLOAT32
    trunk_bytes = c.trunk_values * trunk.dtype.itemsize + c.trunk_floats * _FLOAT32
    pixels, features = patches * model.patch_size**2, head.scratch.output_conv1.in_channels
    # The heads count as float32 also where they run in bfloat16: their last layers never do.
    together = 1 if model.compile_mode == 'cuda-graph' else min(frames, head.frames_per_chunk)
    floats = together * (c.head_floats_per_feature * features + c.head_floats)
    decoding = pixels * (floats + c.head_floats_once * features) * _FLOAT32
    images = frames * pixels * c.image_floats * _FLOAT32
    return selected + max(frames * channels * trunk_bytes, decoding) + images
