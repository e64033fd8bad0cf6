"""Choose how a model runs, compile its hot parts (spec section 16), and count compilations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
# Backends whose kernels read positions on the device, which a captured graph requires.
RING_BACKENDS = ('cudnn', 'flash', 'triton')
_GRAPH_TREES = ('reduce-overhead', 'max-autotune')  # torch captures each compiled unit
_STEP_DOWN = {
    'cuda-graph': 'default',
    'max-autotune': 'default',
    'reduce-overhead': 'default',
    'default': 'off',
}
# Limit for recompilations: each combination of block width, encoding and number of frames is a
# variant of the same few functions.
_VARIANTS = 64
_NO_GRAPH_TREES = (
    "expandable_segments in PYTORCH_ALLOC_CONF excludes torch's CUDA graphs: unset it"
)

_captures = 0
_VARIABLES = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')
_replaced: dict[str, str | None] = {}  # their values before `use_compile_cache`


@dataclass(frozen=True)
class Device:
    """The properties of a device, in this machine or another, that decide how a model runs."""

    type: str  # 'cuda' or 'cpu'
    capability: tuple[int, int] = (0, 0)  # of CUDA
    name: str = ''
    has_triton: bool = True
    expandable_segments: bool = False  # in PYTORCH_ALLOC_CONF; excludes torch's CUDA graph trees

    @classmethod
    def of(cls, device: torch.device) -> 'Device':
        """Return the description of a device of this machine, in this environment."""
        settings = {'has_triton': _has_triton(), 'expandable_segments': _expandable_segments()}
        if device.type != 'cuda':
            return cls(device.type, **settings)
        capability = torch.cuda.get_device_capability(device)
        return cls('cuda', capability, torch.cuda.get_device_name(device), **settings)


@dataclass(frozen=True)
class Execution:
    """Resolved names of compile mode and attention backend: neither is 'auto'."""

    compile_mode: str
    attention_backend: str
    # Each names what was asked for and is not possible, and the reason.
    warnings: tuple[str, ...] = field(default=(), compare=False)


def resolve(mode: str, backend: str, device: Device, dtype: torch.dtype) -> Execution:
    """
    Return compile mode and attention backend for a trunk of `dtype` on `device`.

    `mode` and `backend` are names of config.COMPILE_MODES and ATTENTION_BACKENDS; 'auto' depends
    on device and precision, never on a measurement. If something cannot be compiled or captured,
    the result is the next slower mode, with a warning.

    :raises UserError: names that are unknown or contradict each other, or need another device.
    """
    _refuse_impossible(mode, backend, device, dtype)
    warnings = []
    obstacle = _flashinfer_obstacle(device, dtype) if backend == 'flashinfer' else ''
    if obstacle:
        warnings.append(f"attention_backend 'flashinfer' {obstacle}; going on with 'auto'")
        backend = 'auto'
    if mode == 'auto':
        mode = _auto_mode(backend, device, dtype)
    if backend == 'auto':
        backend = _auto_backend(mode, device, dtype)
    asked = Execution(mode, backend)
    execution, reason = _possible(asked, device)
    if execution != asked:
        warnings.append(_going_on(asked, reason, execution))
    return replace(execution, warnings=tuple(warnings))


def resolve_for(model, mode: str = 'auto', backend: str = 'auto') -> Execution:
    """Return the result of `resolve` for the device and precision of `model`."""
    device = Device.of(model.aggregator.camera_token.device)
    return resolve(mode, backend, device, model.aggregator.dtype)


def _refuse_impossible(mode: str, backend: str, device: Device, dtype: torch.dtype) -> None:
    if mode not in COMPILE_MODES:
        raise UserError(f"'compile_mode' is '{mode}'; use {', '.join(COMPILE_MODES)}")
    if backend not in ATTENTION_BACKENDS:
        raise UserError(f"'attention_backend' is '{backend}'; use {', '.join(ATTENTION_BACKENDS)}")
    if mode == 'cuda-graph' and device.type != 'cuda':
        raise UserError("'compile_mode' is 'cuda-graph', which needs a CUDA device; use auto")
    if mode == 'cuda-graph' and backend == 'sdpa':
        raise UserError(
            "'compile_mode' is 'cuda-graph' and 'attention_backend' is 'sdpa', which cannot "
            f'be captured; use auto, {", ".join(RING_BACKENDS)}, or another compile_mode'
        )
    if backend not in ('auto', 'sdpa') and device.type != 'cuda':
        raise UserError(f"'attention_backend' is '{backend}', which needs a CUDA device; use auto")
    if backend in ('cudnn', 'flash') and dtype == torch.float32:
        raise UserError(
            f"'attention_backend' is '{backend}', which needs 'dtype' bfloat16 or float16; "
            'use auto'
        )


def _flashinfer_obstacle(device: Device, dtype: torch.dtype) -> str:
    """Return why FlashInfer is not possible, or an empty text."""
    if find_spec('flashinfer') is None:
        return "is not installed: pip install 'lingbot_map_ros[flashinfer]'"
    if dtype == torch.float32:
        return "has no kernels for 'dtype' float32: use bfloat16 or float16"
    if device.capability < (8, 0):
        return f'has no kernels for {device.name}'
    try:
        import flashinfer  # noqa: F401  # an optional extra
    except (ImportError, OSError, RuntimeError) as error:
        return f'cannot be imported ({str(error).strip().splitlines()[0]})'
    return ''


def _auto_mode(backend: str, device: Device, dtype: torch.dtype) -> str:
    """Return the fastest mode that does not choose kernels by timing."""
    if device.type != 'cuda' or dtype == torch.float32 or not device.has_triton:
        return 'off'
    return 'cuda-graph' if backend == 'auto' or backend in RING_BACKENDS else 'reduce-overhead'


def _auto_backend(mode: str, device: Device, dtype: torch.dtype) -> str:
    if device.type != 'cuda' or not device.has_triton:
        return 'sdpa'
    if dtype == torch.float32:
        return 'triton' if mode == 'cuda-graph' else 'sdpa'
    if device.capability >= (8, 0):
        return 'cudnn' if device.capability >= (9, 0) else 'flash'
    return 'triton'


def _possible(asked: Execution, device: Device) -> tuple[Execution, str]:
    """Return `asked`, or the fastest possible replacement with the reason for it."""
    mode, backend, reasons = asked.compile_mode, asked.attention_backend, []
    on_ring = backend in RING_BACKENDS
    if device.type == 'cuda' and not device.has_triton and (mode != 'off' or on_ring):
        mode, backend = 'off', 'sdpa' if on_ring else backend
        reasons.append('Triton is not installed')
    elif mode == 'cuda-graph' and backend == 'flashinfer':
        mode = 'reduce-overhead'
        reasons.append("FlashInfer's kernels cannot be captured")
    if mode == 'reduce-overhead' and device.expandable_segments:
        mode = 'default'
        reasons.append(_NO_GRAPH_TREES)
    return Execution(mode, backend), ', '.join(reasons)


def _going_on(before: Execution, reason: str, after: Execution) -> str:
    return (
        f"compile_mode '{before.compile_mode}' with attention_backend "
        f"'{before.attention_backend}' is not possible here ({reason}): going on with "
        f"'{after.compile_mode}' and '{after.attention_backend}'"
    )


def compile_model(model, execution: Execution) -> None:
    """
    Apply `execution` to `model` and log its warnings; code is compiled at its first use.

    Sets `model.compile_mode` and `model.attention_backend`. State-dict keys do not change.
    """
    for warning in execution.warnings:
        LOGGER.warning('%s', warning)
    mode = execution.compile_mode
    _restore(model)
    if mode != 'off':
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    if mode == 'cuda-graph':
        _compile_for_capture(model)
    elif mode != 'off':
        _compile_units(model, _inductor_mode(mode))
    model.compile_mode, model.attention_backend = mode, execution.attention_backend


def warm_up(model, run: Callable[[], None]) -> None:
    """Call `run`, which uses every path; if it fails, repeat in a slower mode with a warning."""
    while True:
        try:
            run()
            return
        # From a compiler, a kernel, a capture, or because memory is full.
        except _failures() as error:
            slower = _step_down(model)
            if slower is None:
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            failed = Execution(model.compile_mode, model.attention_backend)
            slower = replace(slower, warnings=(_going_on(failed, reason, slower),))
        compile_model(model, slower)


def _step_down(model) -> Execution | None:
    """Return the next slower execution, or None if there is none."""
    mode, backend = model.compile_mode, model.attention_backend
    if backend == 'flashinfer':
        return resolve_for(model, mode, 'auto')
    slower = _STEP_DOWN.get(mode)
    if slower is None:  # backends other than sdpa need a compiler even in mode off
        return None if backend == 'sdpa' else Execution('off', 'sdpa')
    return Execution(slower, 'sdpa' if slower == 'off' else backend)


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that compilers and devices raise; Triton has its own base class."""
    known = (RuntimeError, OSError, SubprocessError)
    if not _has_triton():
        return known
    from triton.errors import TritonError  # torch brings it on most platforms, not on all

    return (*known, TritonError)


def compilations() -> int:
    """Return the number of graphs compiled or captured so far in this process."""
    dynamo = sys.modules.get('torch._dynamo.utils')
    compiled = dynamo.counters['stats']['unique_graphs'] if dynamo else 0
    return compiled + _captures


def count_capture() -> None:
    """Count a captured CUDA graph."""
    global _captures
    _captures += 1


def uses_graph_trees(model) -> bool:
    """Return whether torch captures CUDA graphs itself; their outputs are valid for one step."""
    return model.compile_mode in _GRAPH_TREES


def _has_triton() -> bool:
    return find_spec('triton') is not None


def _expandable_segments() -> bool:
    settings = os.environ.get('PYTORCH_ALLOC_CONF', os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''))
    return 'expandable_segments:true' in settings.replace(' ', '').lower()


def _inductor_mode(mode: str) -> str:
    if mode == 'max-autotune' and _expandable_segments():
        LOGGER.warning("compile_mode '%s' runs without CUDA graphs: %s", mode, _NO_GRAPH_TREES)
        return 'max-autotune-no-cudagraphs'
    return mode


def _options(mode: str) -> dict[str, object]:
    options = torch._inductor.list_mode_options(mode)
    if 'max_autotune' not in options:
        options |= {'deterministic': True}  # no choice by timing: every run gives the same bytes
    return options


def _compile_units(model, mode: str) -> None:
    """Compile the units of spec section 16; attention and cache writes stay eager."""
    options = _options(mode)
    trunk = model.aggregator
    for block in (*getattr(trunk.patch_embed, 'blocks', ()), *trunk.frame_blocks):
        block.compile(dynamic=False, options=options)
    for block in trunk.global_blocks:
        block.attn_pre = torch.compile(block.attn_pre, dynamic=False, options=options)
        block.ffn_residual = torch.compile(block.ffn_residual, dynamic=False, options=options)
        block.attn.proj.compile(dynamic=False, options=options)


def _compile_for_capture(model) -> None:
    """Compile everything between the attention kernels, for use inside a captured graph."""
    options = _options('default')
    for block in _blocks(model):
        for unit in ('attn_pre', 'attn_post'):
            compiled = torch.compile(getattr(block, unit), dynamic=False, options=options)
            setattr(block, unit, compiled)
    for head in _dense_heads(model):
        head.frames_per_chunk = 1  # one code for any number of frames, and less memory
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
    Keep compiled code in `folder`, created if missing; '' restores the default folder of torch.

    Call it before the first compilation.

    :raises UserError: the folder cannot be created or written.
    """
    if not folder:
        for name in list(_replaced):
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
