"""
Draw a point cloud and the camera path as one picture: a top view and, below it, a side view.

Map axes follow REP-103: x forward, y left, z up. Both views share the x axis and the scale. Points
that would hide the path are removed: the ceiling in the top view, the near wall in the side view.
"""

from dataclasses import dataclass
import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
import numpy as np

_DPI = 100
_VIEW_PX = (1500, 950)  # size of both views together
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX, _GAP_PX = 90, 30, 70, 110, 75
_TITLE_PX = 34  # from the top edge
_MIN_SIDE_PX = 140
_INK, _PAPER, _GROUND = '#20242b', '#ffffff', '#12151a'
_MARK = {'linestyle': '', 'markersize': 10, 'markeredgecolor': _PAPER, 'markeredgewidth': 1.5}
_STYLES = {
    'path': {'color': '#ff9f1c', 'linewidth': 2.4},
    'ground truth': {'color': '#f4f6f8', 'linewidth': 1.6, 'linestyle': (0, (4, 2))},
    'start': {'marker': 'o', 'color': '#2ec46f', **_MARK},
    'end': {'marker': 's', 'color': '#ff4d5e', **_MARK},
}
_LARGEST_DOT = 3  # [px] radius of points in a sparse cloud
_LEAST_SHOWN = 0.2  # of the cloud; a cut that leaves less is not made


@dataclass(frozen=True)
class _View:
    """Map axes (0 to 2) that point right, up and along the viewing direction; and the cut."""

    name: str
    right: int
    up: int
    toward: int
    sign: float  # +1: larger values of the `toward` axis are nearer to the viewer
    cut: str


_TOP = _View('top view', 0, 1, 2, 1.0, 'cut above the path')
_SIDE = _View('side view', 0, 2, 1, -1.0, 'cut in front of the path')


def render_map(
    points: np.ndarray,
    path: np.ndarray,
    truth: np.ndarray | None = None,
    title: str = '',
    unit: str = 'map units',
) -> bytes:
    """
    Return a PNG of points (N,) POINT_DTYPE and path positions (M, 3) in the map frame.

    `truth` (K, 3) must be aligned to the map. Each array may be empty.
    """
    path = np.asarray(path, np.float64).reshape(-1, 3)
    truth = np.empty((0, 3)) if truth is None else np.asarray(truth, np.float64).reshape(-1, 3)
    xyz = np.stack([points[axis] for axis in 'xyz'], axis=1).astype(np.float64)
    low, high = _limits(xyz, np.concatenate((path, truth)))
    px_per_unit = _scale(high - low)
    figure = Figure(dpi=_DPI, facecolor=_PAPER)
    canvas = FigureCanvasAgg(figure)
    top, side = _place_axes(figure, (high - low) * px_per_unit)
    for view, axes in ((_TOP, top), (_SIDE, side)):
        _draw_cloud(axes, view, xyz, points['rgb'], path, (low, high, px_per_unit))
        _draw_paths(axes, view, path, truth)
        _label(axes, view, low, high, unit)
    _scale_bar(top, low, high, unit)
    _legend(figure, ['path', 'start', 'end'] + ['ground truth'] * (len(truth) > 0))
    x, y = _LEFT_PX / _width_px(figure), 1 - _TITLE_PX / _height_px(figure)
    # A $ in the name of a recording must not start a formula.
    font = {'fontsize': 14, 'fontweight': 'bold', 'parse_math': False}
    figure.text(x, y, title, color=_INK, va='center', **font)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _limits(xyz: np.ndarray, paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return corners (3,) of a box around the paths and the cloud without outliers."""
    corners = [paths] + ([np.percentile(xyz, (1, 99), axis=0)] if len(xyz) else [])
    corners = np.concatenate(corners)
    if not len(corners):
        corners = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    low, high = corners.min(axis=0), corners.max(axis=0)
    extent = (high - low).max() or 1.0
    margin = 0.04 * extent
    thin = (
        np.maximum(0.1 * extent - (high - low), 0) / 2
    )  # minimum size of the view of a flat cloud
    return low - margin - thin, high + margin + thin


def _scale(extent: np.ndarray) -> float:
    return min(_VIEW_PX[0] / extent[0], _VIEW_PX[1] / (extent[1] + extent[2]))


def _place_axes(figure: Figure, size_px: np.ndarray) -> tuple:
    """Add two axes to the figure, each of exactly the size of its view."""
    width = max(size_px[0], 5 * _MIN_SIDE_PX)
    total_width = _LEFT_PX + width + _RIGHT_PX
    total_height = _TOP_PX + size_px[1] + _GAP_PX + size_px[2] + _BOTTOM_PX
    figure.set_size_inches(total_width / _DPI, total_height / _DPI)
    left = (_LEFT_PX + (width - size_px[0]) / 2) / total_width
    across = size_px[0] / total_width

    def axes_at(bottom_px, height_px):
        box = (left, bottom_px / total_height, across, height_px / total_height)
        return figure.add_axes(box)

    top = axes_at(_BOTTOM_PX + size_px[2] + _GAP_PX, size_px[1])
    return top, axes_at(_BOTTOM_PX, size_px[2])


def _draw_cloud(axes, view: _View, xyz, rgb, path, frame) -> None:
    low, high, px_per_unit = frame
    shown = _after_cut(view, xyz, path)
    image = _rasterize(view, xyz[shown], rgb[shown], low, high, px_per_unit)
    axes.imshow(
        image,
        origin='lower',
        interpolation='nearest',
        aspect='auto',
        extent=(low[view.right], high[view.right], low[view.up], high[view.up]),
    )


def _after_cut(view: _View, xyz: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Return (N,) bool: points that do not hide the path from the viewer."""
    everything = np.ones(len(xyz), bool)
    if not len(path) or not len(xyz):
        return everything
    nearness = view.sign * xyz[:, view.toward]
    shown = nearness <= (view.sign * path[:, view.toward]).max()
    return shown if shown.mean() >= _LEAST_SHOWN else everything


def _rasterize(view: _View, xyz, rgb, low, high, px_per_unit) -> np.ndarray:
    """Return the colour of the nearest point per pixel, (H, W, 3) uint8; row 0 is the bottom."""
    right, up = view.right, view.up
    width, height = np.ceil((high - low)[[right, up]] * px_per_unit).astype(int)
    cell = np.floor((xyz[:, [right, up]] - low[[right, up]]) * px_per_unit).astype(int)
    inside = ((cell >= 0) & (cell < (width, height))).all(axis=1)
    nearness = view.sign * xyz[:, view.toward]
    order = np.flatnonzero(inside)[np.argsort(nearness[inside], kind='stable')]
    column, row = cell[order].T
    depth = np.full((height, width), -np.inf)
    image = np.tile(_rgb_of(_GROUND), (height, width, 1))
    depth[row, column] = nearness[order]  # the last point of a pixel, the nearest, stays
    image[row, column] = np.stack([rgb[order] >> shift & 0xFF for shift in (16, 8, 0)], axis=1)
    per_point = width * height / max(1, len(order))
    for _ in range(int(np.clip(np.sqrt(per_point) / 2, 1, _LARGEST_DOT))):
        for shift, axis in ((1, 0), (-1, 0), (1, 1), (-1, 1)):
            _grow(depth, image, shift, axis)
    return image


def _grow(depth: np.ndarray, image: np.ndarray, shift: int, axis: int) -> None:
    """Let each pixel overwrite a neighbour that is farther away, so that points become dots."""
    neighbour = np.roll(depth, shift, axis)
    edge = [slice(None), slice(None)]
    edge[axis] = 0 if shift > 0 else -1
    neighbour[tuple(edge)] = -np.inf  # np.roll wraps around
    nearer = neighbour > depth
    depth[nearer] = neighbour[nearer]
    image[nearer] = np.roll(image, shift, axis)[nearer]


def _rgb_of(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.uint8)


def _draw_paths(axes, view: _View, path: np.ndarray, truth: np.ndarray) -> None:
    drawn = {'ground truth': truth, 'path': path, 'start': path[:1], 'end': path[-1:]}
    for name, positions in drawn.items():
        right, up = positions[:, view.right], positions[:, view.up]
        if name == 'path':
            axes.plot(right, up, color=_GROUND, linewidth=4.5)  # outline against the cloud
        axes.plot(right, up, **_STYLES[name])


def _label(axes, view: _View, low, high, unit: str) -> None:
    names = ('x forward', 'y left', 'z up')
    axes.set_xlim(low[view.right], high[view.right])
    axes.set_ylim(low[view.up], high[view.up])
    axes.set_xlabel(f'{names[view.right]} [{unit}]', color=_INK)
    axes.set_ylabel(f'{names[view.up]} [{unit}]', color=_INK)
    axes.set_title(f'{view.name}, {view.cut}', loc='left', color=_INK, fontsize=10)
    axes.grid(color='#ffffff', alpha=0.13, linewidth=0.6)
    axes.tick_params(colors=_INK, labelsize=9)
    for spine in axes.spines.values():
        spine.set_color('#8b93a1')


def _scale_bar(axes, low, high, unit: str) -> None:
    """Draw the bar above the right end of the axes, beside the title."""
    length = _round_length((high - low)[0] / 5)
    transform = axes.get_xaxis_transform()  # x in map units, y as a fraction of the axes' height
    y = 1 + (_TOP_PX - _TITLE_PX) / axes.bbox.height
    ends = [high[0] - length, high[0]], [y, y]
    axes.plot(*ends, transform=transform, clip_on=False, color=_INK, linewidth=3)
    axes.text(
        high[0] - length,
        y,
        f'{length:g} {unit}  ',
        transform=transform,
        color=_INK,
        fontsize=10,
        ha='right',
        va='center',
    )


def _round_length(length: float) -> float:
    """Return the largest value of 1, 2 or 5 times a power of ten that is at most `length`."""
    power = 10.0 ** np.floor(np.log10(length))
    return power * max(step for step in (1, 2, 5) if step * power <= length * (1 + 1e-9))


def _legend(figure: Figure, names: list[str]) -> None:
    figure.legend(
        handles=[Line2D([], [], label=name, **_STYLES[name]) for name in names],
        **{'loc': 'lower center', 'bbox_to_anchor': (0.5, 0.012), 'ncols': len(names)},
        **{'facecolor': _GROUND, 'labelcolor': _PAPER, 'edgecolor': 'none', 'framealpha': 1},
        **{'fontsize': 10, 'borderpad': 0.7},
    )


def _width_px(figure: Figure) -> float:
    return figure.get_size_inches()[0] * _DPI


def _height_px(figure: Figure) -> float:
    return figure.get_size_inches()[1] * _DPI
