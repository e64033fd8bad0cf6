"""Strict and safe loading of weights: a file, a hub id, the packaged demo, or random ones."""

import logging
import os
from pathlib import Path
import pickle

from lingbot_map.config import demo_checkpoint, MODEL_PRESETS
from lingbot_map.errors import UserError
from lingbot_map.models.gct_stream import GCTStream
from safetensors import SafetensorError
from safetensors.torch import load_file
import torch
from torch import Tensor

PACKAGED_MODEL = 'demo'  # the only preset whose weights come with the package
LOGGER = logging.getLogger(__name__)
OPTIONAL_GROUP = 'point_head'
KEYS_SHOWN = 3


class CheckpointError(UserError):
    """Weights that cannot be used; the message says why and what to do."""


def load_model(
    model_name: str,
    checkpoint: str,
    device: torch.device | str = 'cpu',
    dtype: torch.dtype | None = None,
) -> GCTStream:
    """
    Return the preset `model_name` with the weights that `checkpoint` names, on `device`.

    `checkpoint`: a path (.pt, .safetensors), `hf:owner/name/file[@revision]`, '' (the packaged
    weights, preset `demo` only) or `random`. `dtype` is the trunk's; heads stay float32.

    :raises CheckpointError: unknown preset, missing or unreadable file, weights that do not fit.
    """
    if model_name not in MODEL_PRESETS:
        raise CheckpointError(
            f"model '{model_name}' is unknown; use one of {', '.join(MODEL_PRESETS)}"
        )
    preset = MODEL_PRESETS[model_name]
    if checkpoint == 'random':
        torch.manual_seed(0)
        with torch.device(device):
            model = GCTStream.from_config(preset).to(device)
    else:
        state = read_state(resolve(model_name, checkpoint))
        with torch.device('meta'):
            model = GCTStream.from_config(preset)
        load_weights(model, state, checkpoint or f'packaged {model_name}')
        # Weights stay in the mapped file until here, so the host never holds two copies.
        model.to(device).float()
    set_trunk_dtype(model, dtype or torch.float32)
    return model.eval().requires_grad_(False)


def resolve(model_name: str, checkpoint: str) -> Path:
    """Return the local file that `checkpoint` names; hub files are downloaded once."""
    if not checkpoint:
        if model_name != PACKAGED_MODEL:
            raise CheckpointError(
                f"checkpoint is empty and model '{model_name}' has no packaged weights; set "
                "checkpoint to a file or to 'hf:robbyant/lingbot-map/lingbot-map.pt'"
            )
        return demo_checkpoint()
    if checkpoint.startswith('hf:'):
        return _download(checkpoint)
    return Path(os.path.expanduser(checkpoint))  # leaves a user that there is not


def read_state(path: Path) -> dict[str, Tensor]:
    """
    Return the tensors of a weights file, mapped from disk; no code in it is ever run.

    :raises CheckpointError: missing, not a weights file, damaged, or holding more than tensors.
    """
    try:
        found = path.is_file()
    except OSError as error:  # a folder that may not be entered, a name too long
        raise CheckpointError(
            f"checkpoint '{path}' cannot be read ({error.strerror}); check the path"
        ) from error
    if not found:
        raise CheckpointError(f"checkpoint '{path}' is not a file; check the path")
    try:
        if path.suffix == '.safetensors':
            return load_file(path)
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint '{path}' holds Python objects other than tensors and was not loaded, "
            'since they could run code; save its state dict alone'
        ) from error
    except (RuntimeError, SafetensorError, OSError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{path}' is not a readable weights file ({reason}); download it again"
        ) from error
    state = state.get('model', state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and value.is_floating_point()
        for key, value in state.items()
    ):
        raise CheckpointError(
            f"checkpoint '{path}' is not a state dict: expected tensors of floats by "
            "name, or the same under the key 'model'"
        )
    return state


def load_weights(model: GCTStream, state: dict[str, Tensor], name: str) -> None:
    """
    Assign `state` to `model`; only the whole point head may be extra or missing.

    :raises CheckpointError: any other difference, reported by group with the likely cause.
    """
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    if not any(key.startswith(OPTIONAL_GROUP) for key in expected):
        state = {k: v for k, v in state.items() if not k.startswith(OPTIONAL_GROUP + '.')}
        found = {k: v for k, v in found.items() if k in state}
    elif not any(key.startswith(OPTIONAL_GROUP) for key in found):
        model.point_head = None
        count = len(expected)
        expected = {k: v for k, v in expected.items() if not k.startswith(OPTIONAL_GROUP)}
        LOGGER.warning(
            "checkpoint '%s' has no weights for %s (%d missing): that head is off, points come "
            'from depth', name, OPTIONAL_GROUP, count - len(expected),
        )  # fmt: skip
    problems = _compare(expected, found)
    if problems:
        raise CheckpointError(f"checkpoint '{name}' does not fit the model:\n" + problems)
    model.load_state_dict(state, strict=True, assign=True)


def set_trunk_dtype(model: GCTStream, dtype: torch.dtype) -> None:
    """Put the trunk's matrices into `dtype`; norms, scales, tokens and heads stay float32."""
    for module in model.aggregator.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.to(dtype)


def set_heads_dtype(model: GCTStream, name: str) -> None:
    """
    Choose how the heads multiply: 'fp32', 'tf32' (float32 with short factors), or 'bf16'.

    'bf16' leaves in float32 what forms the outputs: the pose itself and the last convolutions.
    """
    model.heads_tf32 = name != 'fp32'
    dtype = torch.bfloat16 if name == 'bf16' else torch.float32
    parts = [] if model.camera_head is None else [model.camera_head.trunk]
    for head in (model.depth_head, model.point_head, model.local_point_head):
        if head is not None:
            parts += [
                part for name, part in head.scratch.named_children() if name != 'output_conv2'
            ]
            parts += [head.projects, head.resize_layers]
    for part in parts:
        for module in part.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.ConvTranspose2d):
                module.to(dtype)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return the trunk precision for a device: bf16 where it is native, fp16 before, else fp32."""
    device = torch.device(device)
    if device.type != 'cuda':
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _compare(expected: dict[str, tuple], found: dict[str, tuple]) -> str:
    """Return a report of differences by kind and group, or an empty text."""
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    shapes = [
        f'{key} is {found[key]}, expected {expected[key]}'
        for key in sorted(expected.keys() & found.keys())
        if expected[key] != found[key]
    ]
    lines = [
        line
        for title, keys in (
            ('missing', missing),
            ('unexpected', unexpected),
            ('wrong shape', shapes),
        )
        for line in _by_group(title, keys)
    ]
    if lines:
        lines.append('  likely cause: ' + _likely_cause(missing, unexpected, shapes, found))
    return '\n'.join(lines)


def _by_group(title: str, keys: list[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault('.'.join(key.split('.')[:2]), []).append(key)
    return [
        f'  {title}: {group} ({len(members)}): {", ".join(members[:KEYS_SHOWN])}'
        + (' ...' if len(members) > KEYS_SHOWN else '')
        for group, members in groups.items()
    ]


def _likely_cause(
    missing: list[str], unexpected: list[str], shapes: list[str], found: dict[str, tuple]
) -> str:
    if shapes and all('pos_embed' in line for line in shapes) and not missing:
        return 'the checkpoint was made for another img_size; use the preset it was trained with'
    if not found:
        return 'the file holds no tensors'
    if any(key.startswith('module.') for key in unexpected):
        return "a training wrapper's prefix 'module.'; save the inner model's state dict"
    if any('_orig_mod' in key for key in unexpected):
        return "a compiled wrapper's prefix '_orig_mod'; save the inner model's state dict"
    if len(missing) + len(shapes) > len(found) // 2:
        return 'another network or another preset; check the parameter model'
    return 'another version of the network, or an incomplete file'


def _download(checkpoint: str) -> Path:
    name, _, revision = checkpoint.removeprefix('hf:').partition('@')
    owner, _, rest = name.partition('/')
    repository, _, file = rest.partition('/')
    if not (owner and repository and file):
        raise CheckpointError(
            f"checkpoint '{checkpoint}' is not of the form hf:owner/name/file[@revision]"
        )
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' needs the package huggingface_hub; "
            "pip install 'huggingface_hub'"
        ) from error
    try:
        return Path(hf_hub_download(f'{owner}/{repository}', file, revision=revision or None))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        offline = ' (HF_HUB_OFFLINE is set)' if os.environ.get('HF_HUB_OFFLINE') else ''
        raise CheckpointError(
            f"checkpoint '{checkpoint}' could not be downloaded{offline}: "
            f'{reason}; check the name and the network'
        ) from error
