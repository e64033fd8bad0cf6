"""The HTML report of one evaluation, in a single file, and the tables over several."""

import base64
from collections.abc import Mapping, Sequence
import csv
from dataclasses import dataclass, field
import html
import io
from pathlib import Path

from lingbot_map.mapping.export import write_bytes
import numpy as np

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #20242b; max-width: 1150px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
img { max-width: 100%; } figure { margin: 1em 0; } figcaption { color: #5a6372; }
table { border-collapse: collapse; margin: .5em 0; }
td, th { border-bottom: 1px solid #d8dde5; padding: .2em .9em .2em 0; text-align: left;
         vertical-align: top; }
td:nth-child(n+2) { font-variant-numeric: tabular-nums; }
.note { background: #fff4d6; padding: .5em .8em; border-radius: 4px; }
"""
_COLUMNS = {  # title -> keys of the value in metrics.json or timing.json
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


@dataclass(frozen=True)
class Report:
    """Content of the page, in the order shown."""

    title: str
    notes: list[str] = field(default_factory=list)  # shown first
    figures: dict[str, object] = field(default_factory=dict)  # from metrics.json
    pictures: dict[str, bytes] = field(default_factory=dict)  # caption -> PNG
    timing: dict[str, object] = field(default_factory=dict)  # from timing.json
    record: dict[str, object] = field(default_factory=dict)  # from run.yaml


def as_html(report: Report) -> str:
    """Return the page as one text that refers to no other file."""
    title = html.escape(report.title)
    notes = ''.join(f'<p class="note">{html.escape(note)}</p>\n' for note in report.notes)
    pictures = ''.join(_picture(caption, png) for caption, png in report.pictures.items())
    sections = ''.join(
        f'<h2>{name}</h2>\n{_table(values)}'
        for name, values in (
            ('Figures', report.figures),
            ('Time and memory', report.timing),
            ('Settings and versions', report.record),
        )
        if values
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{notes}{pictures}{sections}'
        '</body></html>\n'
    )


def _picture(caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    text = html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f'<figcaption>{text}</figcaption></figure>\n'
    )


def _table(values: Mapping[str, object]) -> str:
    rows = ''.join(
        f'<tr><td>{html.escape(name)}</td><td>{html.escape(_text(value))}</td></tr>\n'
        for name, value in _flat(values, '')
    )
    return f'<table>\n{rows}</table>\n'


def _flat(values: Mapping[str, object], prefix: str):
    """Yield (name, value) of nested mappings, with names joined by ' / '."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{name} / ')
        else:
            yield f'{prefix}{name}', value


def _text(value: object) -> str:
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:.6g}'
    if isinstance(value, list | tuple):
        return ', '.join(_text(item) for item in value) or '-'
    return str(value)


def table_row(metrics: dict, timing: dict) -> dict[str, float | None]:
    """Return {title: value or None} of one evaluation."""
    files = {'metrics': metrics, 'timing': timing}
    return {title: _find(files, keys) for title, keys in _COLUMNS.items()}


def _find(value, keys: Sequence[str]) -> float | None:
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _summary_rows(rows: dict[str, dict]) -> dict[str, dict]:
    """Return the rows mean and median, over the values that are not None."""
    summaries = {}
    for name, reduce in (('mean', np.mean), ('median', np.median)):
        values = {t: [row[t] for row in rows.values() if row[t] is not None] for t in _COLUMNS}
        summaries[name] = {t: float(reduce(v)) if v else None for t, v in values.items()}
    return summaries


def write_table(folder: Path, rows: dict[str, dict]) -> None:
    """Write table.csv: the rows by name, then their mean and median."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(['name', *_COLUMNS])
    for name, row in [*rows.items(), *_summary_rows(rows).items()]:
        writer.writerow([name, *('' if row[t] is None else repr(row[t]) for t in _COLUMNS)])
    write_bytes(folder / 'table.csv', buffer.getvalue().encode())
