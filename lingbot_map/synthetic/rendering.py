"""Render rooms to clips: textured images with exact depth, poses and intrinsics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import functools
import itertools
import math

from lingbot_map.synthetic import shading
from lingbot_map.synthetic.random import hash32
from lingbot_map.synthetic.rooms import build_rooms, NUM_SURFACES, RoomConfig, Rooms
import torch

OCTAVES = tuple(1.6 / 2**i for i in range(8))  # [m] cell sizes of the noise
PICTURE_CELLS = (1.3, 0.31)  # [m] cell sizes of posters and of stickers
_PIXELS_AT_ONCE = {'cpu': 1 << 15, 'cuda': 1 << 24}


@dataclass
class Clip:
    """
    Rendered clips of B rooms and S frames; OpenCV camera axes, the room's world z up.

    rgb uint8 (B, S, 3, H, W); depth float32 (B, S, H, W), z-depth [m]; T_world_cam float32
    (B, S, 4, 4), camera to world; K float32 (B, S, 3, 3) [px], pixel (u, v) looks along
    ((u - cx) / fx, (v - cy) / fy, 1) with integer u and v.
    """

    rgb: torch.Tensor
    depth: torch.Tensor
    T_world_cam: torch.Tensor
    K: torch.Tensor


@torch.no_grad()
def render_clips(seeds: Sequence[int], config: RoomConfig, device: torch.device | str) -> Clip:
    """Render one clip per seed; it depends only on its seed and the config."""
    device = torch.device(device)
    with torch.autocast(device.type, enabled=False):
        return render_rooms(build_rooms(seeds, config, device), config)


@torch.no_grad()
def render_rooms(rooms: Rooms, config: RoomConfig) -> Clip:
    """Render rooms that were built with the same config."""
    num_rooms, num_frames = rooms.T_world_cam.shape[:2]
    frames = _frame_tables(rooms)
    tables = _surface_tables(rooms)
    shape = (num_rooms * num_frames, config.height, config.width)
    depth = torch.empty(shape, device=rooms.seeds.device)
    rgb = torch.empty(shape[0], 3, *shape[1:], dtype=torch.uint8, device=rooms.seeds.device)
    limit = _PIXELS_AT_ONCE[rooms.seeds.device.type]
    num_parts = min(math.ceil(math.prod(shape) / limit), shape[0])
    for start, end in itertools.pairwise(
        round(shape[0] * i / num_parts) for i in range(num_parts + 1)
    ):
        part = slice(start, end)
        depth[part], rgb[part] = _render(
            {name: _contiguous(table[part]) for name, table in frames.items()}, tables, config
        )
    return Clip(
        rgb.unflatten(0, (num_rooms, num_frames)),
        depth.unflatten(0, (num_rooms, num_frames)),
        rooms.T_world_cam.float(),
        rooms.K.float()[:, None].expand(-1, num_frames, -1, -1).contiguous(),
    )


def _render(frames, tables, config):
    """Return depth (F, H, W) and RGB (F, 3, H, W) of some frames."""
    device = tables['keys'].device
    step = functools.partial(_compiled, device_type=device.type)
    u = torch.arange(config.width, device=device, dtype=torch.float32)
    v = torch.arange(config.height, device=device, dtype=torch.float32)[:, None]
    camera, cuboids = frames['camera'], frames['cuboids']
    number = frames['first_surface']
    depth, surface = step(shading.cast_room)(camera, u, v, _contiguous(cuboids[:, 0]), number)
    for box in range(1, cuboids.shape[1]):
        depth, surface = step(shading.cast_box)(
            depth, surface, camera, u, v, _contiguous(cuboids[:, box]), number + 6 * box
        )

    keys, material = tables['keys'], tables['material']
    s, t, footprint, shade = step(shading.locate)(
        depth, surface, camera, u, v, tables['geometry'], material, frames['light']
    )
    where = (s, t, footprint, surface)
    first, second = torch.zeros_like(depth), torch.zeros_like(depth)
    for cell, salt in _layers(OCTAVES, device):
        first, second = step(shading.add_octave)(first, second, *where, keys, material, cell, salt)
    rgb = step(shading.paint_base)(first, second, *where, keys, material)
    for cell, salt in _layers(PICTURE_CELLS, device):
        rgb = step(shading.paint_pictures)(rgb, *where, keys, material, cell, salt + 211)
    rgb = step(shading.paint_openings)(rgb, *where, material, shade)
    rgb = step(shading.develop)(
        rgb, u, v, frames['look'], _contiguous(frames['gains'].movedim(1, 0)), frames['noise_key']
    )
    return depth, rgb


def _contiguous(table):
    # A view would cause another compilation, for its offset, strides and base.
    return table.clone(memory_format=torch.contiguous_format)


def _frame_tables(rooms):
    """Return per-frame tables, first dimension B * S, float32 or int32."""
    num_rooms, num_frames = rooms.T_world_cam.shape[:2]
    device = rooms.seeds.device

    def per_frame(table):
        return table.float().repeat_interleave(num_frames, 0)[..., None, None]

    pose = rooms.T_world_cam.float().flatten(0, 1)
    K = rooms.K.float().repeat_interleave(num_frames, 0)
    lens = torch.stack((K[:, 0, 0], K[:, 0, 2], K[:, 1, 2]), -1)
    camera = torch.cat((pose[:, :3, :3].flatten(1), pose[:, :3, 3], lens), -1)
    yaw = rooms.cuboids[..., 6:7]
    cuboids = torch.cat((rooms.cuboids[..., :6], yaw.cos(), yaw.sin()), -1)

    frame = torch.arange(num_frames, device=device)
    sway = torch.sin(frame * 0.09 + rooms.look[:, 7:8])
    exposure = (rooms.light[:, 4:5] * (1 + rooms.look[:, 6:7] * sway)).flatten()
    look = torch.cat((rooms.look[:, 2:6].repeat_interleave(num_frames, 0), exposure[:, None]), -1)
    gains = torch.stack(
        (rooms.look[:, 0], torch.ones_like(rooms.look[:, 0]), rooms.look[:, 1]), -1
    )
    noise_key = hash32(rooms.keys[:, :1] + hash32(frame.to(torch.int32)))
    first = torch.arange(num_rooms, device=device, dtype=torch.int32) * NUM_SURFACES
    return {
        'camera': camera[..., None, None],
        'cuboids': per_frame(cuboids),
        'light': per_frame(rooms.light[:, :4]),
        'look': look.float()[..., None, None],
        'gains': per_frame(gains),
        'noise_key': noise_key.flatten()[:, None, None],
        'first_surface': first.repeat_interleave(num_frames)[:, None, None],
    }


def _surface_tables(rooms):
    """Return per-surface tables, last dimension B * 54."""
    return {
        'geometry': rooms.geometry.float().flatten(0, 1).T.contiguous(),
        'material': rooms.material.float().flatten(0, 1).T.contiguous(),
        'keys': _contiguous(rooms.keys.flatten()),
    }


@functools.cache
def _layers(cells, device):
    # Tensors instead of numbers, so that one compiled kernel serves all layers.
    return [
        (
            torch.full((1,), cell, device=device),
            torch.full((1,), 977 * i, dtype=torch.int32, device=device),
        )
        for i, cell in enumerate(cells)
    ]


@functools.cache
def _compiled(function: Callable, device_type: str) -> Callable:
    return torch.compile(function, dynamic=True) if device_type == 'cuda' else function
