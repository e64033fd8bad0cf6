"""Errors of a model on rendered rooms, streamed with keyframes and eviction."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lingbot_map.config import DEMO_STREAM
from lingbot_map.evaluation.metrics import ate, path_length
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.settings import StreamConfig
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.synthetic.rendering import Clip, render_clips
from lingbot_map.synthetic.rooms import RoomConfig
import numpy as np
import torch


@dataclass(frozen=True)
class RoomScore:
    """Errors of one room, as reported in the README."""

    ate_percent: float  # RMSE of positions after Sim(3) alignment, % of the path length
    rotation_deg: float  # mean angle error of poses relative to the first camera
    abs_rel: float  # mean relative depth error after scaling by one factor per room


def evaluate_rooms(
    model: GCTStream, seeds, device: torch.device | str, config: RoomConfig
) -> Iterator[RoomScore]:
    """Stream the rooms of `seeds` through an engine; yield the errors of each."""
    engine = StreamEngine(model, StreamConfig(**DEMO_STREAM), device)
    for seed in seeds:
        clip = render_clips([seed], config, device)
        engine.reset()
        results = []
        for rgb in clip.rgb[0].permute(0, 2, 3, 1).cpu().numpy():
            results += engine.push(np.ascontiguousarray(rgb))
        yield score(results, clip)


def score(results: list[FrameResult], clip: Clip) -> RoomScore:
    """Return the errors of one room's results against the rendered ground truth."""
    T = np.stack([result.T_world_cam for result in results])
    T_true = clip.T_world_cam[0].double().cpu().numpy()
    depth = torch.stack([result.depth for result in results])
    return score_arrays(T, T_true, depth, clip.depth[0])


def score_arrays(
    T: np.ndarray, T_true: np.ndarray, depth: torch.Tensor, depth_true: torch.Tensor
) -> RoomScore:
    """Return the errors of poses (S, 4, 4) camera-to-world and depth maps (S, H, W)."""
    positions, positions_true = T[:, :3, 3], T_true[:, :3, 3]
    rmse = ate(positions, positions_true).error.rmse
    R, R_true = T[:, :3, :3], T_true[:, :3, :3]
    difference = (R[0].T @ R).transpose(0, 2, 1) @ (R_true[0].T @ R_true)
    cosine = (np.trace(difference, axis1=1, axis2=2) - 1) / 2
    angle = np.degrees(np.arccos(np.clip(cosine, -1, 1))).mean()
    ratio = depth_true / depth
    abs_rel = ((depth * ratio.median() - depth_true).abs() / depth_true).mean()
    return RoomScore(100 * rmse / path_length(positions_true), float(angle), float(abs_rel))


def summary(scores: list[RoomScore]) -> str:
    """Return the distribution of the scores as a Markdown table."""
    names = {
        'ate_percent': 'Sim(3) ATE [% of the path]',
        'rotation_deg': 'rotation [deg]',
        'abs_rel': 'depth AbsRel',
    }
    rows = ['| error | median | mean | 25 % | 75 % | worst |', '|---|---|---|---|---|---|']
    for key, title in names.items():
        values = np.array([asdict(score)[key] for score in scores])
        numbers = (
            np.median(values),
            values.mean(),
            *np.percentile(values, (25, 75)),
            values.max(),
        )
        rows.append(f'| {title} | ' + ' | '.join(f'{number:.3g}' for number in numbers) + ' |')
    return '\n'.join(rows)
