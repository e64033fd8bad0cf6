"""Compile the hot parts of a model (spec section 16), and count what was compiled."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
import logging
import os
from subprocess import SubprocessError
import sys

from lingbot_map.cli import writable_folder
from lingbot_map.config import ATTENTION_BACKENDS, COMPILE_MODES
from lingbot_map.errors import UserError
from lingbot_map.heads.dpt_head import FRAMES_PER_CHUNK
import torch
from torch import nn

LOGGER = logging.getLogger(__name__)
# Backends whose kernels read positions on the device, as a captured graph needs it.
RING_BACKENDS = ('cudnn', 'flash', 'triton')
_GRAPH_TREES = ('reduce-overhead', 'max-autotune')  # torch captures every unit by itself
_STEP_DOWN = {
    'cuda-graph': 'default',
    'max-autotune': 'default',
    'reduce-overhead': 'default',
    'default': 'off',
}
# Each combination of block width, encoding and frames is a variant of the same few functions.
_VARIANTS = 64

_captures = 0
_VARIABLES = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')
_replaced: dict[str, str | None] = {}  # what these were before


def compile_model(model, mode: str = 'auto', attention_backend: str = 'auto') -> None:
    """
    Choose how the model's streaming runs; what has to be compiled is so at its first use.

    `mode` and `attention_backend` are names of config.COMPILE_MODES and ATTENTION_BACKENDS; 'auto'
    follows device and precision, never a measurement. The resolved names are in
    `model.compile_mode` and `model.attention_backend`. State-dict keys do not change.

    :raises ValueError: names that are unknown or do not go together, or need another device.
    """
    device, dtype = model.aggregator.camera_token.device, model.aggregator.dtype
    attention_backend = _available(attention_backend, device, dtype)
    mode = resolve_mode(mode, attention_backend, device, dtype)
    backend = _resolve_backend(attention_backend, mode, device, dtype)
    _restore(model)
    if mode != 'off':
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    if mode == 'cuda-graph':
        _compile_for_capture(model)
    elif mode != 'off':
        _compile_units(model, _without_conflicts(mode))
    model.compile_mode, model.attention_backend = mode, backend


def resolve_mode(mode: str, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the compile mode that `compile_model` chooses; raise UserError as it does."""
    mode = _resolved_mode(mode, backend, device, dtype)
    _resolve_backend(backend, mode, device, dtype)
    return mode


def _resolved_mode(mode: str, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    if mode not in COMPILE_MODES:
        raise UserError(f"'compile_mode' is '{mode}'; use {', '.join(COMPILE_MODES)}")
    capturable = backend == 'auto' or backend in RING_BACKENDS
    if mode == 'auto':
        if device.type != 'cuda' or dtype == torch.float32 or not _has_triton():
            return 'off'
        return 'cuda-graph' if capturable else 'reduce-overhead'
    if mode == 'cuda-graph' and device.type != 'cuda':
        raise UserError("'compile_mode' is 'cuda-graph', which needs a CUDA device; use auto")
    if mode == 'cuda-graph' and not capturable:
        raise UserError(
            f"'compile_mode' is 'cuda-graph' and 'attention_backend' is '{backend}', which cannot "
            f'be captured; use auto, {", ".join(RING_BACKENDS)}, or another compile_mode'
        )
    return mode


def settle(model, rehearse: Callable[[], None]) -> None:
    """Run `rehearse`, which uses every path; where that fails, again in a slower way."""
    while True:
        try:
            rehearse()
            return
        # Of a compiler, a kernel, a capture, or for want of memory.
        except _failures() as error:
            slower = _step_down(model.compile_mode, model.attention_backend)
            if slower is None:
                raise
            reason = str(error).strip() or repr(error)
            LOGGER.warning(
                "compile_mode '%s' with attention_backend '%s' is not possible here (%s): going "
                "on with '%s' and '%s'",
                model.compile_mode,
                model.attention_backend,
                reason.splitlines()[0],
                *slower,
            )
        compile_model(model, *slower)


def compilations() -> int:
    """Return how many graphs this process has compiled or captured so far."""
    dynamo = sys.modules.get('torch._dynamo.utils')
    compiled = dynamo.counters['stats']['unique_graphs'] if dynamo else 0
    return compiled + _captures


def count_capture() -> None:
    """Note that a CUDA graph was captured."""
    global _captures
    _captures += 1


def uses_graph_trees(model) -> bool:
    """Return whether torch keeps CUDA graphs of its own, whose outputs live for one step."""
    return model.compile_mode in _GRAPH_TREES


def _resolve_backend(backend: str, mode: str, device: torch.device, dtype: torch.dtype) -> str:
    if backend not in ATTENTION_BACKENDS:
        raise UserError(f"'attention_backend' is '{backend}'; use {', '.join(ATTENTION_BACKENDS)}")
    half = dtype != torch.float32
    if backend == 'auto':
        if device.type != 'cuda' or not _has_triton():
            return 'sdpa'
        if not half:
            return 'triton' if mode == 'cuda-graph' else 'sdpa'
        capability = torch.cuda.get_device_capability(device)
        return 'cudnn' if capability >= (9, 0) else 'flash' if capability >= (8, 0) else 'triton'
    if backend != 'sdpa' and device.type != 'cuda':
        raise UserError(f"'attention_backend' is '{backend}', which needs a CUDA device; use auto")
    if backend in ('cudnn', 'flash') and not half:
        raise UserError(
            f"'attention_backend' is '{backend}', which needs 'dtype' bfloat16 or float16; "
            'use auto'
        )
    return backend


def _step_down(mode: str, backend: str) -> tuple[str, str] | None:
    if backend == 'flashinfer':
        return mode, 'auto'
    slower = _STEP_DOWN.get(mode)
    if slower is None:  # the kernels of the other backends need a compiler, too
        return None if backend == 'sdpa' else ('off', 'sdpa')
    return slower, 'sdpa' if slower == 'off' else backend


def _failures() -> tuple[type[Exception], ...]:
    """Return what compilers and devices raise; Triton has exceptions of its own."""
    known = (RuntimeError, OSError, SubprocessError)
    if not _has_triton():
        return known
    from triton.errors import TritonError

    return (*known, TritonError)


def _available(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return `backend`, or 'auto' with a warning if FlashInfer is asked for and not possible."""
    if backend != 'flashinfer' or device.type != 'cuda':
        return backend
    if find_spec('flashinfer') is None:
        obstacle = "is not installed: pip install 'lingbot_map_ros[flashinfer]'"
    elif dtype == torch.float32:
        obstacle = "has no kernels for 'dtype' float32: use bfloat16 or float16"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        obstacle = f'has no kernels for {torch.cuda.get_device_name(device)}'
    else:
        try:
            import flashinfer  # noqa: F401

            return backend
        except (ImportError, OSError, RuntimeError) as error:
            obstacle = f'cannot be imported ({str(error).strip().splitlines()[0]})'
    LOGGER.warning("attention_backend 'flashinfer' %s; going on with 'auto'", obstacle)
    return 'auto'


def _has_triton() -> bool:
    return find_spec('triton') is not None


def _without_conflicts(mode: str) -> str:
    settings = os.environ.get('PYTORCH_ALLOC_CONF', os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''))
    if mode in _GRAPH_TREES and 'expandable_segments:true' in settings.replace(' ', '').lower():
        LOGGER.warning(
            "compile_mode '%s' runs without CUDA graphs, since they do not go together with "
            'expandable_segments in the environment (PYTORCH_ALLOC_CONF): unset it',
            mode,
        )
        return 'default' if mode == 'reduce-overhead' else 'max-autotune-no-cudagraphs'
    return mode


def _options(mode: str) -> dict[str, object]:
    options = torch._inductor.list_mode_options(mode)
    if 'max_autotune' not in options:
        options |= {'deterministic': True}  # no choice by timing: the same bytes in every run
    return options


def _compile_units(model, mode: str) -> None:
    """Compile what spec section 16 lists; attention and cache writes stay eager."""
    options = _options(mode)
    trunk = model.aggregator
    for block in (*getattr(trunk.patch_embed, 'blocks', ()), *trunk.frame_blocks):
        block.compile(dynamic=False, options=options)
    for block in trunk.global_blocks:
        block.attn_pre = torch.compile(block.attn_pre, dynamic=False, options=options)
        block.ffn_residual = torch.compile(block.ffn_residual, dynamic=False, options=options)
        block.attn.proj.compile(dynamic=False, options=options)


def _compile_for_capture(model) -> None:
    """Compile all that lies between the attention kernels, for use inside a captured graph."""
    options = _options('default')
    for block in _blocks(model):
        for unit in ('attn_pre', 'attn_post'):
            compiled = torch.compile(getattr(block, unit), dynamic=False, options=options)
            setattr(block, unit, compiled)
    for head in _dense_heads(model):
        head.frames_per_chunk = 1  # the same code, and less memory, for one frame and for many
        head.decode = torch.compile(head.decode, dynamic=False, options=options)


def _restore(model) -> None:
    for module in model.modules():
        module._compiled_call_impl = None
    for block in _blocks(model):
        for unit in ('attn_pre', 'attn_post', 'ffn_residual'):
            block.__dict__.pop(unit, None)
    for head in _dense_heads(model):
        head.frames_per_chunk = FRAMES_PER_CHUNK
        head.__dict__.pop('decode', None)


def _blocks(model) -> Iterator[nn.Module]:
    trunk = model.aggregator
    yield from getattr(trunk.patch_embed, 'blocks', ())
    yield from trunk.frame_blocks
    yield from trunk.global_blocks
    if model.camera_head is not None:
        yield from model.camera_head.trunk


def _dense_heads(model) -> list[nn.Module]:
    heads = (model.depth_head, model.point_head, model.local_point_head)
    return [head for head in heads if head is not None]


def use_compile_cache(folder: str) -> None:
    """
    Keep compiled code in `folder`, made if missing, instead of torch's temporary one; '' does not.

    To be called before the first compilation.

    :raises UserError: the folder cannot be made or written.
    """
    if not folder:
        for name in list(_replaced):  # by a folder that was named earlier
            _set(name, _replaced.pop(name))
        return
    try:
        path = writable_folder(folder)
    except OSError as error:
        raise UserError(
            f"'compile_cache_dir' is '{folder}', where nothing can be written "
            f'({error.strerror}): choose another folder'
        ) from error
    for name, value in zip(_VARIABLES, (path, path / 'triton'), strict=True):
        _replaced.setdefault(name, os.environ.get(name))
        _set(name, str(value))


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
