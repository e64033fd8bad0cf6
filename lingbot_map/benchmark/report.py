"""Format measurements as tables to print and as values for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
import datetime
from importlib.metadata import PackageNotFoundError, version
import os
from pathlib import Path
import platform

from lingbot_map.benchmark.setup import Setup
from lingbot_map.benchmark.speed import Run
import numpy as np
import torch

_PERCENTILES = (50, 95, 99)
_TRACE_PER_LINE = 5
_EARLY = 200  # frame that is compared with the last one of the trace


def origin(command: str, device: torch.device) -> dict[str, object]:
    """Return the origin of the figures: command, date, machine, versions."""
    on_cuda = device.type == 'cuda'
    return {
        'command': command,
        'date': datetime.date.today().isoformat(),
        'device': torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        'cores': len(os.sched_getaffinity(0)),
        'python': platform.python_version(),
        'torch': torch.__version__,
        'cuda': torch.version.cuda or 'none',
        'cudnn': torch.backends.cudnn.version() if on_cuda else 'none',
        'triton': _version('triton'),
    }


def origin_lines(values: dict[str, object]) -> list[str]:
    versions = ', '.join(f'{name} {values[name]}' for name in ('python', 'torch', 'triton'))
    return [
        str(values['command']),
        f'{values["date"]}, {values["device"]}, {values["cores"]} cores, {versions}',
    ]


def setup_line(setup: Setup) -> str:
    """Return one line with the settings that all runs of a call share."""
    return (
        f'{setup.model} model, {setup.weights or "packaged"} weights, {setup.image_width}x'
        f'{setup.image_height}, window {setup.sliding_window}, keyframe interval '
        f'{setup.keyframe_interval}, dtype '
        f'{str(setup.trunk_dtype).removeprefix("torch.")}, heads {setup.heads_dtype}'
    )


def memory_line(setup: Setup) -> str:
    return f'memory for {setup.max_keyframes} keyframes, on_limit {setup.on_limit}'


def run_lines(run: Run) -> list[str]:
    """Return all figures of one run."""
    count = len(run.pushes)
    return [
        f'compile_mode, attention_backend: {run.label}',
        _line('weights in host memory to READY', run.ready_s, 's'),
        _line(f'scale batch of {run.setup.num_scale_frames}', run.scale_batch_ms, 'ms'),
        f'{f"{count} later frames [ms]":34}' + ''.join(f'{f"p{p}":>9}' for p in _PERCENTILES),
        _percentiles('network, until pose is on host', run.forward_ms),
        *_full_lines(run),
        _percentiles('upload', np.array([push.preprocess_ms for push in run.pushes])),
        _percentiles('total, until device is idle', np.array([p.wall_ms for p in run.pushes])),
        *(
            _line(f'median around {percent} % of the run', ms, 'ms')
            for percent, ms in run.positions_ms().items()
        ),
        _line('global rate', run.fps, 'frames per second'),
        *_memory_lines(run),
        f'{"compilations since READY":34}{run.recompiles:9d}',
        *_trace_lines(run.trace_ms()),
        *(_line(name, ms, 'ms') for name, ms in run.outside.items()),
    ]


def comparison_lines(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """Return a table with one row per run; the last column is the speed relative to the first."""
    titles = ('READY', 'scale batch', 'median', 'p99/median', 'rate', 'peak', 'compiled', 'speed')
    units = ('s', 'ms', 'ms', '', '1/s', 'GB', 'since READY', 'x first')
    width = max(len(label) for label in labels) + 2
    rows = [
        f'{label:{width}}{run.ready_s:12.1f}{run.scale_batch_ms:12.1f}{run.median_ms:12.2f}'
        f'{run.p99_over_median:12.3f}{run.fps:12.1f}{run.peak_gb:12.2f}{run.recompiles:12d}'
        f'{runs[0].median_ms / run.median_ms:12.2f}'
        for label, run in zip(labels, runs, strict=True)
    ]
    head = [' ' * width + ''.join(f'{text:>12}' for text in texts) for texts in (titles, units)]
    return [*head, *rows]


def run_values(run: Run) -> dict[str, object]:
    """Return all figures of one run for JSON, with the times of all frames."""
    return {
        'setup': asdict(run.setup) | {'device': str(run.setup.device)},
        'label': run.label,
        'ready_s': run.ready_s,
        'scale_batch_ms': run.scale_batch_ms,
        'median_ms': run.median_ms,
        'window_filled': bool(len(run.full_ms)),
        'p99_over_median': run.p99_over_median,
        'percentiles_ms': {p: float(np.percentile(run.forward_ms, p)) for p in _PERCENTILES},
        'positions_ms': run.positions_ms(),
        'fps': run.fps,
        'peak_gb': run.peak_gb,
        'reserved_gb': run.reserved_gb,
        'recompiles': run.recompiles,
        'trace_ms': run.trace_ms(),
        'outside_ms': run.outside,
        'frames': [asdict(push) for push in run.pushes],
    }


def _line(name: str, value: float, unit: str) -> str:
    return f'{name:34}{value:9.2f} {unit}'


def _percentiles(name: str, times: np.ndarray) -> str:
    return f'  {name:32}' + ''.join(f'{np.percentile(times, p):9.2f}' for p in _PERCENTILES)


def _full_lines(run: Run) -> list[str]:
    if not len(run.full_ms):
        return ['  the window was never full']
    line = _percentiles(f'{len(run.full_ms)} with a full window', run.full_ms)
    return [f'{line}   p99/p50 {run.p99_over_median:.3f}']


def _memory_lines(run: Run) -> list[str]:
    if not run.peak_gb:
        return []
    unit = f'GB, {run.reserved_gb:.2f} reserved by the allocator'
    return [_line('peak GPU memory', run.peak_gb, unit)]


def _trace_lines(trace_ms: dict[int, float]) -> list[str]:
    texts = [f'{index}: {ms:.2f}' for index, ms in trace_ms.items()]
    parts = [texts[i : i + _TRACE_PER_LINE] for i in range(0, len(texts), _TRACE_PER_LINE)]
    lines = [f'{"frame: ms" if i == 0 else "":12}' + '  '.join(p) for i, p in enumerate(parts)]
    if _EARLY in trace_ms and (last := max(trace_ms)) > _EARLY:
        ratio = trace_ms[last] / trace_ms[_EARLY]
        lines.append(f'{f"ms at frame {last} / at {_EARLY}":34}{ratio:9.3f}')
    return lines


def _cpu_name() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(': ')[2] for line in lines if line.startswith('model name')]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return 'none'
