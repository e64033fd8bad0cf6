"""What a set of rendered rooms is like, and whether it keeps its promises."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
import math

from lingbot_map.synthetic.rendering import render_rooms
from lingbot_map.synthetic.rooms import (
    build_rooms,
    footprint_distance,
    HORIZONTAL_FOV,
    NUM_BOXES,
    ROOM_HEIGHT,
    ROOM_SIDE,
    RoomConfig,
)
import torch

MARKS = ('min', '25 %', '50 %', '75 %', 'max')
_FAR = 1e3  # [m] distance of boxes that are not there


@dataclass(frozen=True)
class Quantity:
    """One number per clip, with the bounds that each must keep."""

    name: str
    unit: str
    values: torch.Tensor  # (B,)
    low: float = -math.inf
    high: float = math.inf

    @property
    def kept(self) -> bool:
        """Tell whether every value is finite and within the bounds (1e-6 for rounding)."""
        return bool(((self.values >= self.low - 1e-6) & (self.values <= self.high + 1e-6)).all())

    def line(self) -> str:
        """Return name, minimum, quartiles, maximum, bounds and verdict in columns."""
        marks = torch.quantile(
            self.values.double(), torch.tensor((0, 0.25, 0.5, 0.75, 1), dtype=torch.float64)
        )
        numbers = ' '.join(f'{mark:8.3f}' for mark in marks.tolist())
        bounds = '' if self.low == -math.inf else f'{self.low:.2f} .. {self.high:.2f}'
        verdict = '' if not bounds else 'kept' if self.kept else 'VIOLATED'
        return f'{self.name:26}{self.unit:5}{numbers}   {bounds:16} {verdict}'.rstrip()


def clip_quantities(seeds: Sequence[int], config: RoomConfig) -> list[Quantity]:
    """Measure the clips of the seeds, their depth on images of a quarter of the size."""
    small = replace(config, width=max(config.width // 4, 1), height=max(config.height // 4, 1))
    rooms = build_rooms(seeds, small, torch.device('cpu'))
    clip = render_rooms(rooms, small)
    centres = clip.T_world_cam[..., :3, 3].double()
    steps = centres.diff(dim=1).norm(dim=-1)
    forward = clip.T_world_cam[..., :2, 2].double()
    ahead, after = forward[:, :-1], forward[:, 1:]
    turn = torch.atan2(
        ahead[..., 0] * after[..., 1] - ahead[..., 1] * after[..., 0], (ahead * after).sum(-1)
    )
    size = 2 * rooms.cuboids[:, 0, 3:6]
    boxes = rooms.cuboids[:, 1:]
    to_boxes = footprint_distance(centres[:, None, :, :2], boxes).amin(-1)
    to_boxes = torch.where(boxes[..., 7] > 0, to_boxes, _FAR).amin(-1)
    to_walls = (size[:, None, :2] / 2 - centres[..., :2].abs()).amin((1, 2))
    fov = 2 * torch.atan(small.width / 2 / clip.K[:, 0, 0, 0].double())
    depth = clip.depth.flatten(1)
    return [
        Quantity('path length', 'm', steps.sum(-1), 4.0),
        Quantity('mean step', 'm', steps.mean(-1), 0.05, 0.10),
        Quantity('longest step', 'm', steps.amax(-1)),
        Quantity('total yaw', 'deg', turn.abs().sum(-1).rad2deg(), 90.0),
        Quantity('fastest yaw per frame', 'deg', turn.abs().amax(-1).rad2deg()),
        Quantity(
            'horizontal field of view',
            'deg',
            fov.rad2deg(),
            *(math.degrees(bound) for bound in HORIZONTAL_FOV),
        ),
        Quantity('camera height', 'm', centres[..., 2].mean(-1), 0.3, 1.8),
        Quantity('room side, shorter', 'm', size[:, :2].amin(-1), *ROOM_SIDE),
        Quantity('room side, longer', 'm', size[:, :2].amax(-1), *ROOM_SIDE),
        Quantity('room height', 'm', size[:, 2], *ROOM_HEIGHT),
        Quantity('boxes', '', boxes[..., 7].sum(-1), *NUM_BOXES),
        Quantity('clearance to walls', 'm', to_walls, 0.35),
        Quantity('clearance to boxes', 'm', to_boxes, 0.35),
        Quantity('nearest depth', 'm', depth.amin(-1), 0.05, 15.0),
        Quantity('median depth', 'm', depth.median(-1).values),
        Quantity('farthest depth', 'm', depth.amax(-1), 0.05, 15.0),
    ]
