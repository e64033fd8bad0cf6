"""Plots of one evaluation: path and ground truth, errors over time, and some frames."""

from collections.abc import Sequence
from dataclasses import dataclass
import io

from lingbot_map.evaluation.metrics import Alignment
from lingbot_map.evaluation.run import PlacedFrame
from lingbot_map.evaluation.scoring import Matched, pose_errors
import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
import numpy as np

_DPI = 100
_OURS, _TRUTH, _ERROR = '#ff7f0e', '#3b4252', '#c2185b'


@dataclass(frozen=True)
class Preview:
    """Input and output of the network for one frame, at its resolution."""

    stamp_ns: int
    rgb: np.ndarray  # (h, w, 3) uint8
    depth: np.ndarray  # (h, w)
    confidence: np.ndarray  # (h, w)


class PreviewKeeper:
    """Keeps previews of the frames with the given stamps."""

    def __init__(self, stamps_ns: Sequence[int]):
        self.previews: list[Preview] = []
        self._wanted = set(stamps_ns)

    def __call__(self, placed: PlacedFrame) -> None:
        if placed.stamp_ns in self._wanted:
            frame = placed.frame
            arrays = (t.cpu().numpy() for t in (frame.rgb, frame.depth, frame.confidence))
            self.previews.append(Preview(placed.stamp_ns, *arrays))


def draw_trajectories(T_map_cam: np.ndarray, matched: Matched | None, to_truth: Alignment | None):
    """
    Return a PNG of the path from above and from the side, in map axes.

    With an alignment, the truth is drawn too and the unit is metres.
    """
    scale = 1.0 if to_truth is None else to_truth.scale
    paths = {'estimate': (scale * T_map_cam[:, :3, 3], _OURS, '-')}
    if to_truth is not None:
        truth = scale * to_truth.inverse()(matched.T_true[:, :3, 3])
        paths['ground truth'] = (truth, _TRUTH, '--')
    figure, unit = _figure(11, 5), 'map units' if to_truth is None else 'm'
    for place, (up, name) in enumerate(((1, 'y left'), (2, 'z up')), start=1):
        axes = figure.add_subplot(1, 2, place)
        for label, (xyz, colour, style) in paths.items():
            axes.plot(xyz[:, 0], xyz[:, up], style, color=colour, label=label, linewidth=1.6)
        start = paths['estimate'][0][0]
        axes.plot(start[0], start[up], 'o', color='#2e9e5b', label='start', markersize=7)
        axes.set_title('from above' if up == 1 else 'from the side')
        axes.set_xlabel(f'x forward [{unit}]')
        axes.set_ylabel(f'{name} [{unit}]')
        axes.set_aspect('equal', 'datalim')
        axes.grid(alpha=0.3)
    axes.legend(loc='best')
    return _png(figure)


def draw_errors(matched: Matched, to_truth: Alignment) -> bytes:
    """Return a PNG of position and rotation errors over time, after the alignment."""
    distances, angles = pose_errors(matched, to_truth)
    seconds = (matched.stamps_ns - matched.stamps_ns[0]) * 1e-9
    figure = _figure(11, 4.5)
    first = figure.add_subplot(2, 1, 1)
    first.plot(seconds, distances, color=_ERROR)
    first.set_ylabel('position error [m]')
    second = figure.add_subplot(2, 1, 2, sharex=first)
    second.plot(seconds, angles, color=_ERROR)
    second.set_ylabel('rotation error [deg]')
    second.set_xlabel('time [s]')
    for axes in (first, second):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return _png(figure)


def draw_strip(previews: Sequence[Preview]) -> bytes:
    """Return a PNG with image, depth and confidence per column; bright is near or confident."""
    figure = _figure(2.1 * len(previews), 2.1 * 3 * _aspect(previews[0]) + 0.4)
    depths = np.concatenate([p.depth[np.isfinite(p.depth)] for p in previews])
    near, far = np.percentile(depths, (2, 98)) if len(depths) else (1.0, 2.0)
    confident = max(float(np.percentile(p.confidence, 98)) for p in previews)
    for column, preview in enumerate(previews):
        inverse = 1 / np.clip(preview.depth, near, max(far, near * 1.001))
        rows = (
            (preview.rgb, {}),
            (inverse, {'cmap': 'turbo', 'vmin': 1 / far, 'vmax': 1 / near}),
            (preview.confidence, {'cmap': 'viridis', 'vmin': 1.0, 'vmax': max(confident, 1.001)}),
        )
        for row, (image, style) in enumerate(rows):
            axes = figure.add_subplot(3, len(previews), 1 + column + row * len(previews))
            axes.imshow(image, **style)
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(('image', 'depth', 'confidence')[row])
            if row == 0:
                seconds = (preview.stamp_ns - previews[0].stamp_ns) * 1e-9
                axes.set_title(f'+{seconds:.1f} s', fontsize=9)
    return _png(figure)


def _aspect(preview: Preview) -> float:
    height, width = preview.depth.shape
    return height / width


def _figure(width: float, height: float) -> Figure:
    with matplotlib.rc_context({'font.size': 9}):
        return Figure(figsize=(width, height), dpi=_DPI, layout='constrained')


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
