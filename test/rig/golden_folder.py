"""A folder of golden data: its files, the models they describe, and the limits of deviation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
import json
from pathlib import Path
import re
from typing import NamedTuple

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.models.gct_stream import GCTStream
from safetensors import SafetensorError
from safetensors.torch import load_file
import torch
from torch import Tensor


@dataclass(frozen=True)
class Limit:
    """Largest allowed |result - golden|: absolute + relative * |golden|."""

    absolute: float
    relative: float = 0.0

    def __str__(self) -> str:
        if self == EXACT:
            return 'exact'
        relative = f'{self.relative:.0e}|x|' if self.relative else ''
        absolute = f'{self.absolute:.0e}' if self.absolute else ''
        return '+'.join(filter(None, (absolute, relative)))

    def times(self, factor: float) -> 'Limit':
        return Limit(self.absolute * factor, self.relative * factor)


@dataclass(frozen=True)
class Deviation:
    """How far one quantity is from its golden; `share` is the part of the limit used up."""

    quantity: str
    largest: float
    share: float
    limit: Limit

    @property
    def past(self) -> bool:
        return not self.share <= 1  # not a number counts as past

    def __str__(self) -> str:
        mark = ' past' if self.past else ''
        return f'{self.quantity} {self.largest:.2g} ({self.limit}{mark})'


@dataclass(frozen=True)
class Setting:
    """One comparison. `shows_defect`: the golden is wrong on purpose, so it must not be met."""

    name: str
    part: str
    run: Callable[[], list[Deviation]]
    shows_defect: bool = False


class GoldenError(ValueError):
    """A golden folder that cannot be read or understood, in one line."""


EXACT = Limit(0.0)


def compare(quantity: str, result: Tensor, golden: Tensor, limit: Limit) -> Deviation:
    """Return the largest deviation and the largest share of the limit over all elements."""
    if result.shape != golden.shape:
        shapes = f'{list(result.shape)} instead of {list(golden.shape)}'
        raise GoldenError(f'{quantity} has the shape {shapes}')
    golden = golden.double()
    error = (result.detach().cpu().double() - golden).abs()
    allowed = limit.absolute + limit.relative * golden.abs()
    share = torch.where(error == 0, 0.0, error / allowed)
    return Deviation(quantity, error.max().item(), share.max().item(), limit)


def count(quantity: str, wrong: int) -> Deviation:
    """Return the deviation of something that is right or wrong: how often it was wrong."""
    return Deviation(quantity, wrong, float('inf') if wrong else 0.0, EXACT)


def worst(group: str, deviations: list[Deviation]) -> Deviation:
    """Return the deviation nearest to its limit, its name completed by that of the group."""
    found = max(deviations, key=lambda d: float('inf') if d.past else d.share)
    return replace(found, quantity=f'{group}[{len(deviations)}]:{found.quantity}')


def thin_like(result: Tensor, golden: Tensor) -> Tensor:
    """Return every s-th row and column of maps [S, H, W, ...], so that they fit the golden's."""
    rows, columns = result.shape[1:3]
    for step in range(1, rows + 1):
        if (-(-rows // step), -(-columns // step)) == golden.shape[1:3]:
            return result[:, ::step, ::step]
    return result


class Call(NamedTuple):
    """One forward call of a streaming run; `before` frames had been kept when it began."""

    frames: range
    kept: bool
    before: int
    outputs: dict[str, Tensor]


def stream(
    model: GCTStream, images: Tensor, num_scale_frames: int, keyframe_interval: int
) -> Iterator[Call]:
    """Run images [S, 3, H, W] through `forward`, call by call (spec section 13.6)."""
    m = min(num_scale_frames, len(images))
    calls = [(range(m), True)]
    for i in range(m, len(images)):
        calls.append((range(i, i + 1), (i - m) % max(keyframe_interval, 1) == 0))
    model.clean_kv_cache()
    for frames, kept in calls:
        model._set_skip_append(not kept)
        before = model.memory.kept if model.memory else 0
        outputs = model(
            images[None, frames.start : frames.stop],
            num_frame_for_scale=m,
            num_frame_per_block=len(frames),
            causal_inference=True,
        )
        yield Call(frames, kept, before, outputs)


def group_of(tensors: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return the tensors called `group/...` by what follows the slash."""
    start = f'{group}/'
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


class GoldenFolder:
    """Reads a folder; PREFIX_config.json says which architecture and which settings."""

    def __init__(self, path: Path, prefix: str = 'tiny', device: str = 'cpu'):
        self.path = path
        self.prefix = prefix
        self.device = torch.device(device)

    @property
    def slack(self) -> float:
        """Return the factor on every limit: a GPU sums in another order."""
        return 1.0 if self.device.type == 'cpu' else 10.0

    def json(self, name: str) -> dict | list | None:
        """Return the parsed file, None when it is missing."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise GoldenError(f'{path.name} is not valid JSON: {error}') from error

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file, none when it is missing."""
        path = self.path / name
        if not path.exists():
            return {}
        try:
            return load_file(path)
        except SafetensorError as error:
            raise GoldenError(f'{path.name} is not a safetensors file: {error}') from error

    def group(self, name: str, setting: str) -> dict[str, Tensor]:
        """Return the goldens of one setting in PREFIX_<name>.safetensors."""
        return group_of(self.prefixed[name], setting)

    @cached_property
    def prefixed(self) -> dict[str, dict[str, Tensor]]:
        """Return the PREFIX_*.safetensors files of goldens, by the name after the prefix."""
        names = ('sequences', 'windowed', 'special', 'modules', 'frames', 'weights')
        return {name: self.tensors(f'{self.prefix}_{name}.safetensors') for name in names}

    @cached_property
    def config(self) -> dict:
        """Return PREFIX_config.json, empty when it is missing."""
        return self.json(f'{self.prefix}_config.json') or {}

    def images(self, entry: dict, dense: Tensor | None = None) -> Tensor:
        """Return the frames [S, 3, H, W] in [0, 1] of a setting; by name or by what fits."""
        frames = self.prefixed['frames']
        name = entry.get('frames') or self.config.get('modules', {}).get('frames')
        if name not in frames:
            name = next((k for k in frames if dense is not None and _fits(frames[k], dense)), None)
        if name is None:
            raise GoldenError(f'no frames for {entry.get("name")} in {self.prefix}_frames')
        images = frames[name][: entry.get('num_frames')]
        return images.to(self.device).float() / 255

    @cached_property
    def _recipe(self) -> dict[str, Tensor]:
        """Return the weights of the recipe, which go by their names, with those of the points."""
        model = GCTStream.from_config({**self.config['model'], 'enable_point': True})
        fill_model(model, self.config.get('weight_salt', ''), through_float16=True)
        return model.state_dict()

    def model(self, overrides: dict, edits: list[dict] = ()) -> GCTStream:
        """Return the folder's model in float32 with its weights, changed as the edits say."""
        with torch.device('meta'):
            model = GCTStream.from_config({**self.config['model'], **overrides}).eval()
        wanted = model.state_dict().keys()
        weights = {
            k: v.float().clone()
            for k, v in (self.prefixed['weights'] or self._recipe).items()
            if k in wanted or not k.startswith('point_head.')
        }
        model.load_state_dict(weights, assign=True)
        for edit in edits:
            edit_weights(model.state_dict(), edit, self.config['model']['embed_dim'])
        return model.to(self.device)


def _fits(frames: Tensor, dense: Tensor) -> bool:
    return thin_like(frames[:, 0], dense).shape[1:3] == dense.shape[1:3]


def edit_weights(weights: dict[str, Tensor], edit: dict, width: int) -> None:
    """Apply one `weight_edits` entry of the configuration in place; its rule is a sentence."""
    rule = edit['rule']
    elements = re.findall(r'element (\d+) set to (-?[\d.]+(?:e-?\d+)?)', rule)
    if elements:
        for index, value in elements:
            weights[rule.split()[0]].view(-1)[int(index)] = float(value)
        return
    selects = _key_selector(rule)
    keys = [key for key in weights if selects(key)]
    if not keys:
        raise GoldenError(f'weight edit selects nothing: {rule}')
    rows = 2 * width if 'first 2C rows' in rule else None
    for key in keys:
        weights[key][:rows] *= edit['factor']


def _key_selector(rule: str) -> Callable[[str], bool]:
    """Return the predicate of 'key starts with A [and ends with B] or is one of C.{d,e}, F'."""
    start = re.search(r'starts with (\S+)', rule)
    end = re.search(r'ends with (\S+)', rule)
    listed = re.search(r'(?:is one of|matches) ([^:]+)', rule)
    names = [_glob(name) for name in listed[1].split(', ')] if listed else []

    def selects(key: str) -> bool:
        if any(re.fullmatch(name, key) for name in names):
            return True
        return bool(start) and key.startswith(start[1]) and key.endswith(end[1] if end else '')

    return selects


def _glob(pattern: str) -> str:
    """Return a regular expression: {a,b} are alternatives, a lone N is a number."""
    pattern = re.escape(pattern.strip()).replace(r'\{', '(').replace(r'\}', ')')
    return re.sub(r'\bN\b', r'\\d+', pattern.replace(',', '|'))
