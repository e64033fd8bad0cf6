"""Random rooms: geometry, materials, light, camera paths and intrinsics, without rendering."""

from collections.abc import Sequence
from dataclasses import dataclass
import math

from lingbot_map.synthetic.materials import materials
from lingbot_map.synthetic.paths import camera_paths
from lingbot_map.synthetic.random import between, constant, uniforms
import torch

ROOM_SIDE = (4.0, 8.0)  # [m]
ROOM_HEIGHT = (2.4, 3.0)  # [m]
NUM_BOXES = (3, 8)
HORIZONTAL_FOV = (math.radians(55.0), math.radians(90.0))
BOX_CLEARANCE = 0.4  # [m] between camera path and box
MAX_BOXES = NUM_BOXES[1]
NUM_SURFACES = 6 * (1 + MAX_BOXES)
BOX_TRIALS = 40
_UNUSED = (0.0, 0.0, -1000.0, 0.1, 0.1, 0.1, 0.0, 0.0)  # cuboid of an unused box, out of view

_SIZE, _BOXES, _BOX_COUNT, _CAMERA, _LOOK, _KEYS, _LIGHT = range(1, 8)


@dataclass(frozen=True)
class RoomConfig:
    """Image size [px], frames per clip, range of a clip's mean step [m], candidate paths."""

    width: int = 168
    height: int = 126
    num_frames: int = 64
    mean_step: tuple[float, float] = (0.066, 0.095)
    path_candidates: int = 32

    def __post_init__(self):
        if min(self.width, self.height, self.num_frames, self.path_candidates) < 1:
            raise ValueError(f'{self}: every count must be at least 1')
        if not 0 < self.mean_step[0] <= self.mean_step[1]:
            raise ValueError(f'mean_step {self.mean_step}: give (low, high) with 0 < low <= high')


# Do not change: the published figures of the demo model refer to these rooms.
TEST_SEEDS = range(10_000, 10_032)
TEST_CONFIG = RoomConfig()
VALIDATION_SEEDS = range(20_000, 20_256)
FIRST_TRAINING_SEED = 1_000_000
SAMPLE_SEED = 10_100
# A path as in the test set, resampled to a third of the speed.
SAMPLE_CONFIG = RoomConfig(width=336, height=252, num_frames=67)
SAMPLE_FRAMES = 200


@dataclass
class Rooms:
    """
    Rooms on one device, world z up, floor centred on the origin at z = 0.

    Cuboid 0 is the room itself, seen from inside; unused boxes are far below the floor. Surface
    6 * cuboid + 2 * axis + side is the cuboid's face on the low (0) or high (1) side of its axis.

    seeds (B,) int64; cuboids (B, 9, 8) float64: centre x y z, half size x y z [m], yaw [rad],
    in use (0 or 1); T_world_cam (B, S, 4, 4) float64; K (B, 3, 3) float64 [px]; light (B, 5)
    float64: position [m], ambient share, exposure; look (B, 8) float64: red and blue gain,
    vignetting, blur, noise, gamma, exposure sway and its phase; geometry (B, 54, 14) and
    material (B, 54, 29) float64, columns named in materials.py; keys (B, 54) int32.
    """

    seeds: torch.Tensor
    cuboids: torch.Tensor
    T_world_cam: torch.Tensor
    K: torch.Tensor
    light: torch.Tensor
    look: torch.Tensor
    geometry: torch.Tensor
    material: torch.Tensor
    keys: torch.Tensor


def build_rooms(seeds: Sequence[int], config: RoomConfig, device: torch.device) -> Rooms:
    """Return one room per seed; it depends only on its seed and the config."""
    # Nothing here synchronises with the GPU, so training can prepare rooms while it computes.
    seeds = torch.as_tensor(seeds, dtype=torch.int64).to(device, non_blocking=True)
    draws = uniforms(
        seeds,
        (
            (_SIZE, (3,)),
            (_BOXES, (MAX_BOXES, BOX_TRIALS, 9)),
            (_BOX_COUNT, ()),
            (_CAMERA, (1,)),
            (_LOOK, (8,)),
            (_LIGHT, (5,)),
            (_KEYS, (NUM_SURFACES,)),
        ),
    )
    size = between(draws[_SIZE], (ROOM_SIDE, ROOM_SIDE, ROOM_HEIGHT))
    paths = camera_paths(seeds, size, config.num_frames, config.mean_step, config.path_candidates)
    shell = torch.cat(
        (
            torch.zeros_like(size[:, :2]),
            size[:, 2:] / 2,
            size / 2,
            torch.zeros_like(size[:, :1]),
            torch.ones_like(size[:, :1]),
        ),
        -1,
    )
    cuboids = torch.cat((shell[:, None], _place_boxes(draws, size, paths.xy)), 1)
    key_numbers = draws[_KEYS] * 2**32 - 2**31
    return Rooms(
        seeds,
        cuboids,
        paths.T_world_cam,
        _intrinsics(draws[_CAMERA], config),
        _lights(draws[_LIGHT], size),
        _looks(draws[_LOOK]),
        _face_geometry(cuboids),
        materials(seeds, cuboids),
        key_numbers.floor().to(torch.int32),
    )


def footprint_distance(xy: torch.Tensor, cuboids: torch.Tensor) -> torch.Tensor:
    """
    Return horizontal distances [m] between points and cuboids, 0 inside.

    xy (..., S, 2) and cuboids (..., 8) as in Rooms, with equal or broadcast leading shapes.
    """
    offset = xy - cuboids[..., None, :2]
    cos, sin = cuboids[..., None, 6].cos(), cuboids[..., None, 6].sin()
    along = cos * offset[..., 0] + sin * offset[..., 1]
    across = cos * offset[..., 1] - sin * offset[..., 0]
    outside = torch.stack((along, across), -1).abs() - cuboids[..., None, 3:5]
    return outside.clamp(min=0).norm(dim=-1)


def _place_boxes(draws, size, path_xy):
    """Return boxes (B, 8, 8); each is the first of its trials with clearance to the path."""
    draw = draws[_BOXES]
    shrink = torch.linspace(1.0, 0.4, BOX_TRIALS, dtype=torch.float64, device=draw.device)
    half = between(draw[..., :3], ((0.12, 0.65), (0.07, 0.4), (0.12, 1.0))) * shrink[:, None]
    room = size[:, None, None, :]
    hung = draw[..., 3] < 0.25
    half[..., 2] = torch.where(hung, half[..., 2] * 0.4, half[..., 2])
    above_floor = (room[..., 2] - 2 * half[..., 2]) * (0.15 + 0.45 * draw[..., 4])
    z = half[..., 2] + torch.where(hung, above_floor, 0.0)

    # Two of three boxes stand against a wall, the others anywhere and at any angle.
    at_wall = draw[..., 5] < 0.65
    wall = (draw[..., 6] * 4).floor()
    along_x = wall >= 2
    along_limit = torch.where(along_x, room[..., 0], room[..., 1]) / 2 - half[..., 0] - 0.02
    wall_distance = torch.where(along_x, room[..., 1], room[..., 0]) / 2 - half[..., 1] - 0.02
    side = (wall % 2) * 2 - 1
    place = 2 * draw[..., 7:9] - 1
    wall_x = torch.where(along_x, place[..., 0] * along_limit, side * wall_distance)
    wall_y = torch.where(along_x, side * wall_distance, place[..., 0] * along_limit)
    reach = half[..., :2].norm(dim=-1) + 0.02
    x = torch.where(at_wall, wall_x, place[..., 0] * (room[..., 0] / 2 - reach))
    y = torch.where(at_wall, wall_y, place[..., 1] * (room[..., 1] / 2 - reach))
    yaw = torch.where(at_wall, torch.where(along_x, 0.0, math.pi / 2), math.pi * draw[..., 6])
    trials = torch.cat(
        (
            x[..., None],
            y[..., None],
            z[..., None],
            half,
            yaw[..., None],
            torch.ones_like(yaw)[..., None],
        ),
        -1,
    )

    clear = footprint_distance(path_xy[:, None, None], trials).amin(-1) >= BOX_CLEARANCE
    order = torch.arange(BOX_TRIALS, 0, -1, device=draw.device)
    chosen = (clear * order).argmax(-1)
    boxes = trials.gather(2, chosen[..., None, None].expand(-1, -1, 1, 8))[:, :, 0]
    count = NUM_BOXES[0] + draws[_BOX_COUNT] * (NUM_BOXES[1] - NUM_BOXES[0] + 1)
    # Boxes without a valid trial are skipped; later ones fill the count.
    fits = clear.any(-1)
    used = fits & (fits.cumsum(-1) <= count.floor()[:, None])
    unused = constant(_UNUSED, boxes.device)
    return torch.where(used[..., None], boxes, unused)


def _face_geometry(cuboids):
    """Return (B, 54, 14): corner, directions of s and t, normal into free space, lengths."""
    half, yaw = cuboids[..., 3:6], cuboids[..., 6]
    zero, one = torch.zeros_like(yaw), torch.ones_like(yaw)
    axes = torch.stack(
        (
            torch.stack((yaw.cos(), yaw.sin(), zero), -1),
            torch.stack((-yaw.sin(), yaw.cos(), zero), -1),
            torch.stack((zero, zero, one), -1),
        ),
        -2,
    )
    corner = cuboids[..., :3] - (half[..., None] * axes).sum(-2)
    outward = torch.ones_like(yaw)
    outward[:, 0] = -1
    faces = []
    for axis, (s, t) in enumerate(((1, 2), (0, 2), (0, 1))):
        for side in (0, 1):
            start = corner + 2 * side * half[..., axis, None] * axes[..., axis, :]
            normal = axes[..., axis, :] * ((2 * side - 1) * outward)[..., None]
            faces.append(
                torch.cat(
                    (
                        start,
                        axes[..., s, :],
                        axes[..., t, :],
                        normal,
                        2 * half[..., s, None],
                        2 * half[..., t, None],
                    ),
                    -1,
                )
            )
    return torch.stack(faces, -2).flatten(1, 2)


def _intrinsics(draw, config):
    fov = between(draw, (HORIZONTAL_FOV,))[:, 0]
    K = torch.zeros(len(fov), 3, 3, dtype=torch.float64, device=fov.device)
    K[:, 0, 0] = K[:, 1, 1] = config.width / 2 / torch.tan(fov / 2)
    K[:, 0, 2], K[:, 1, 2], K[:, 2, 2] = config.width / 2, config.height / 2, 1
    return K


def _lights(draw, size):
    draw = between(draw, ((-0.3, 0.3), (-0.3, 0.3), (0.75, 0.95), (0.4, 0.7), (0.8, 1.25)))
    return torch.cat((draw[:, :3] * size, draw[:, 3:]), -1)


def _looks(draw):
    return between(
        draw,
        (
            (0.88, 1.12),
            (0.88, 1.12),
            (0.0, 0.3),
            (0.07, 0.2),
            (0.5, 4.0),
            (0.85, 1.2),
            (0.0, 0.08),
            (0.0, 6.28),
        ),
    )
