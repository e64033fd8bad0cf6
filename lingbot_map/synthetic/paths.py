"""Random smooth camera paths of robots and walking people in empty rooms, in batches."""

from dataclasses import dataclass
import math

from lingbot_map.synthetic.random import uniforms
import torch

WALL_MARGIN = 0.5  # [m] between path and walls
ROBOT_HEIGHT = (0.3, 1.2)  # [m]
HANDHELD_HEIGHT = (1.25, 1.75)  # [m], mean height
MAX_YAW_STEP = math.radians(6.0)  # of the heading, per frame
REFERENCE_STEPS = 63  # number of steps that TOTAL_YAW refers to
TOTAL_YAW = (math.radians(100.0), math.radians(320.0))

_SPEED, _TURN, _HEADING, _STYLE, _REST, _GAZE = range(100, 106)
_LENGTH, _PLACE, _WOBBLE = 200, 202, 204


@dataclass
class CameraPaths:
    """xy (B, S, 2) [m] and T_world_cam (B, S, 4, 4), float64, world z up."""

    xy: torch.Tensor
    T_world_cam: torch.Tensor


def camera_paths(
    seeds: torch.Tensor,
    room_size: torch.Tensor,
    num_frames: int,
    mean_step: tuple[float, float],
    num_candidates: int,
) -> CameraPaths:
    """
    Return one path per seed inside rooms (B, 3) [m] whose floor is centred on the origin.

    Takes the first of num_candidates random paths that fits into the room and whose total yaw is
    within TOTAL_YAW. The last candidate is a circle, which always fits.
    """
    draws = uniforms(
        seeds,
        (
            (_SPEED, (num_candidates, 2, 3)),
            (_LENGTH, ()),
            (_TURN, (num_candidates, 4, 3)),
            (_HEADING, (num_candidates, 1)),
            (_PLACE, (2,)),
            (_STYLE, ()),
            (_GAZE, (3, 3)),
            (_REST, (2,)),
            (_WOBBLE, (3, 3, 3)),
        ),
    )
    handheld = draws[_STYLE][:, None, None] < 0.5
    rates, steps = _motion(draws, num_frames, mean_step, room_size)
    heading = torch.cumsum(rates, -1) + 2 * math.pi * draws[_HEADING]
    yaw = heading + torch.where(handheld, _gaze(draws[_GAZE], num_frames), 0.0)
    middle = (heading[..., 1:] + heading[..., :-1]) / 2
    moves = steps[..., None] * torch.stack((middle.cos(), middle.sin()), -1)
    xy = torch.nn.functional.pad(moves.cumsum(-2), (0, 0, 1, 0))

    low, high = xy.amin(-2), xy.amax(-2)
    slack = room_size[:, None, :2] - 2 * WALL_MARGIN - (high - low)
    total_yaw = yaw.diff(dim=-1).abs().sum(-1) * (REFERENCE_STEPS / max(num_frames - 1, 1))
    accepted = (slack.amin(-1) >= 0) & (total_yaw >= TOTAL_YAW[0]) & (total_yaw <= TOTAL_YAW[1])
    accepted[:, -1] = True
    order = torch.arange(num_candidates, 0, -1, device=seeds.device)
    chosen = (accepted * order).argmax(-1)

    rows = torch.arange(len(seeds), device=seeds.device)
    centre = slack[rows, chosen].clamp(min=0) * (draws[_PLACE] - 0.5)
    xy = xy[rows, chosen] - ((low + high)[rows, chosen] / 2 - centre)[:, None]
    return CameraPaths(xy, _poses(draws, xy, yaw[rows, chosen], handheld[:, 0]))


def _motion(draws, num_frames, mean_step, room_size):
    """Return yaw rates (B, M, S) [rad per frame] and step lengths (B, M, S - 1) [m]."""
    draw = draws[_SPEED]
    speed = 1 + (0.35 * draw[..., 0, None] * _waves(draw, num_frames - 1, (24, 120))).sum(-2)
    length = mean_step[0] + (mean_step[1] - mean_step[0]) * draws[_LENGTH]
    steps = speed * (length[:, None] / speed.mean(-1))[..., None]

    draw = draws[_TURN]
    waves = (draw[..., 1:, 0, None] * _waves(draw[..., 1:, :], num_frames, (20, 110))).sum(-2)
    bias = (2 * draw[..., :1, 0] - 1) * 0.6
    rates = MAX_YAW_STEP * torch.tanh(bias + 0.8 * waves)
    tightest = length * (REFERENCE_STEPS / math.radians(150))
    radius = torch.minimum(0.49 * (room_size[:, :2].amin(-1) - 2 * WALL_MARGIN), tightest)
    side = torch.where(draw[:, -1, 0, 1] < 0.5, -1.0, 1.0)
    rates[:, -1, 1:] = steps[:, -1] * (side / radius)[:, None]
    return rates, steps


def _gaze(draw, num_frames):
    """Return the yaw (B, 1, S) [rad] of a handheld camera relative to the walking direction."""
    offset = (draw[:, :1, 0] + draw[:, :1, 1] - 1) * math.radians(110)
    sway = (draw[:, 1:, :1] * _waves(draw[:, 1:], num_frames, (40, 120))).sum(-2)
    return (offset + math.radians(35) * sway)[:, None]


def _poses(draws, xy, yaw, handheld):
    num_frames = xy.shape[1]
    draw, shake = draws[_REST], draws[_WOBBLE]
    slow = _waves(shake[:, :, :2], num_frames, (14, 60)).mean(-2)
    fast = _waves(shake[:, :, 2:], num_frames, (4, 9)).mean(-2)
    wobble = slow + 0.25 * fast

    rest_pitch = math.radians(5) - math.radians(17) * draw[:, :1]  # positive: up
    pitch = rest_pitch + torch.where(handheld, math.radians(4), math.radians(0.25)) * wobble[:, 0]
    roll = torch.where(handheld, math.radians(3), math.radians(0.2)) * wobble[:, 1]
    robot_z = ROBOT_HEIGHT[0] + (ROBOT_HEIGHT[1] - ROBOT_HEIGHT[0]) * draw[:, 1:2]
    hand_z = HANDHELD_HEIGHT[0] + (HANDHELD_HEIGHT[1] - HANDHELD_HEIGHT[0]) * draw[:, 1:2]
    z = torch.where(handheld, hand_z + 0.03 * slow[:, 2] + 0.008 * fast[:, 2], robot_z)
    position = torch.cat((xy, z.expand(-1, num_frames)[..., None]), -1)

    T = torch.zeros(*xy.shape[:2], 4, 4, dtype=torch.float64, device=xy.device)
    T[..., :3, :3] = _optical_rotation(yaw, pitch, roll)
    T[..., :3, 3] = position
    T[..., 3, 3] = 1
    return T


def _optical_rotation(yaw, pitch, roll):
    """Return rotations (..., 3, 3) from optical axes to the world (z up)."""
    cy, sy, cp, sp = yaw.cos(), yaw.sin(), pitch.cos(), pitch.sin()
    right = torch.stack((sy, -cy, torch.zeros_like(yaw)), -1)
    forward = torch.stack((cy * cp, sy * cp, sp), -1)
    down = torch.stack((cy * sp, sy * sp, -cp), -1)  # forward x right
    cr, sr = roll.cos()[..., None], roll.sin()[..., None]
    return torch.stack((cr * right + sr * down, cr * down - sr * right, forward), -1)


def _waves(draw, num_frames, periods):
    """Return sines (..., S); columns 1 and 2 of draw set phase and period [frames]."""
    time = torch.arange(num_frames, dtype=torch.float64, device=draw.device)
    period = periods[0] * (periods[1] / periods[0]) ** draw[..., 2, None]
    return torch.sin(2 * math.pi * (time / period + draw[..., 1, None]))


def slowed(T: torch.Tensor, num_frames: int) -> torch.Tensor:
    """
    Resample poses (B, S, 4, 4) to num_frames along the same path, both ends included.

    Catmull-Rom splines of the matrix entries; rotations are then projected to SO(3).
    """
    last = T.shape[1] - 1
    at = torch.linspace(0, last, num_frames, dtype=T.dtype, device=T.device)
    segment = at.long().clamp(max=last - 1)
    f = (at - segment)[:, None, None]
    a, b, c, d = (T[:, (segment + step).clamp(0, last)] for step in (-1, 0, 1, 2))
    slope, bend = c - a, 2 * a - 5 * b + 4 * c - d
    result = b + 0.5 * f * (slope + f * (bend + f * (3 * (b - c) + d - a)))
    U, _, Vt = torch.linalg.svd(result[..., :3, :3])
    result[..., :3, :3] = U @ Vt
    return result
