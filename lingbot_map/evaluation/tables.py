"""Several evaluations side by side: one row each, and their mean and median."""

from collections.abc import Sequence
import csv
import io
import json
from pathlib import Path

from lingbot_map.mapping.export import write_bytes
import numpy as np

_COLUMNS = {  # title -> where the value is in metrics.json, or timing.json for FPS
    'images': ('metrics', 'images'),
    'coverage [%]': ('metrics', 'coverage_percent'),
    'path [m]': ('metrics', 'path_length_m'),
    'ATE Sim(3) [m]': ('metrics', 'ate', 'sim3', 'rmse'),
    'ATE Sim(3) [% of path]': ('metrics', 'ate_percent_of_path', 'sim3'),
    'ATE SE(3) [m]': ('metrics', 'ate', 'se3', 'rmse'),
    'RPE 1 frame [m]': ('metrics', 'rpe', 'sim3', 'frames', '1', 'translation', 'rmse'),
    'RPE 1 frame [deg]': ('metrics', 'rpe', 'sim3', 'frames', '1', 'rotation_deg', 'rmse'),
    'drift [%]': ('metrics', 'drift_percent', 'sim3'),
    'scale': ('metrics', 'scale'),
    'FPS': ('timing', 'fps'),
}


def table_row(metrics: dict, timing: dict) -> dict[str, float | None]:
    """Return title -> value; None where there is no value."""
    files = {'metrics': metrics, 'timing': timing}
    return {title: _find(files, keys) for title, keys in _COLUMNS.items()}


def _find(value, keys: Sequence[str]) -> float | None:
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def summary_rows(rows: dict[str, dict]) -> dict[str, dict]:
    """Return the rows mean and median over those that have a value."""
    summaries = {}
    for name, reduce in (('mean', np.mean), ('median', np.median)):
        values = {t: [row[t] for row in rows.values() if row[t] is not None] for t in _COLUMNS}
        summaries[name] = {t: float(reduce(v)) if v else None for t, v in values.items()}
    return summaries


def write_tables(folder: Path, rows: dict[str, dict]) -> None:
    """Write table.csv, table.md and table.json of rows by name, with mean and median."""
    summaries = summary_rows(rows)
    content = {'evaluations': rows, **summaries}
    write_bytes(folder / 'table.json', (json.dumps(content, indent=2) + '\n').encode())
    everything = [*rows.items(), *summaries.items()]
    write_bytes(folder / 'table.csv', _csv(everything).encode())
    write_bytes(folder / 'table.md', as_markdown(everything).encode())


def as_markdown(rows: Sequence[tuple[str, dict]]) -> str:
    """Return a table in Markdown."""
    lines = ['| name | ' + ' | '.join(_COLUMNS) + ' |', '|---' * (len(_COLUMNS) + 1) + '|']
    for name, row in rows:
        cells = ('-' if row[t] is None else f'{row[t]:.4g}' for t in _COLUMNS)
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def _csv(rows: Sequence[tuple[str, dict]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(['name', *_COLUMNS])
    for name, row in rows:
        writer.writerow([name, *('' if row[t] is None else repr(row[t]) for t in _COLUMNS)])
    return buffer.getvalue()
