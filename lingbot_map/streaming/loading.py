"""Load the engine that the settings describe."""

from __future__ import annotations

from lingbot_map.errors import UserError
from lingbot_map.settings import (
    EngineSettings,
    ParameterError,
    stream_config,
    StreamConfig,
    usual_image_size,
)
from lingbot_map.streaming.budget import apply_limit, blank_model, check_memory, memory_limit
from lingbot_map.streaming.checkpoint import (
    default_dtype,
    load_model,
    PACKAGED_MODEL,
    set_heads_dtype,
)
from lingbot_map.streaming.compiling import (
    compile_model,
    Device,
    Execution,
    resolve,
    use_compile_cache,
)
from lingbot_map.streaming.engine import StreamEngine
import torch


def load_engine(params: EngineSettings) -> StreamEngine:
    """
    Load the network onto its device; call this in the thread that will use it.

    :raises CheckpointError: the weights cannot be used.
    :raises ParameterError: there is no such device, or it does not support a setting.
    :raises UserError: the folder for compiled code cannot be used.
    :raises MemoryLimitError: the device has too little memory; also raised by the engine's
        `check_memory`.
    """
    device = choose_device(params.device)
    dtype = default_dtype(device) if params.dtype == 'auto' else getattr(torch, params.dtype)
    use_compile_cache(params.compile_cache_dir)
    execution = _execution(params, device, dtype)
    config = _settled_config(params, device, dtype, execution)
    model = load_model(params.model, params.checkpoint, device, dtype)
    set_heads_dtype(model, params.heads_dtype)
    compile_model(model, execution)

    def check(height: int, width: int) -> None:
        limit = memory_limit(params.gpu_memory_limit, device)
        check_memory(model, config, height, width, limit)

    return StreamEngine(model, config, device, check)


def _execution(params: EngineSettings, device: torch.device, dtype: torch.dtype) -> Execution:
    try:
        return resolve(params.compile_mode, params.attention_backend, Device.of(device), dtype)
    except UserError as error:
        raise ParameterError(f'parameter {error}') from None


def _settled_config(
    params: EngineSettings, device: torch.device, dtype: torch.dtype, execution: Execution
) -> StreamConfig:
    """Return the settings of the engine, reduced to the memory if fit_memory is set."""
    return apply_limit(
        blank_model(params.model, dtype, params.heads_dtype, execution.compile_mode),
        stream_config(params),
        *usual_image_size(params),
        memory_limit(params.gpu_memory_limit, device),
        params.fit_memory,
    )


def weights_origin(params: EngineSettings) -> str:
    """Return a text with the source of the weights, without loading them."""
    if params.checkpoint:
        return params.checkpoint
    if params.model != PACKAGED_MODEL:
        return 'no checkpoint is set, and there are no packaged weights for this model'
    return 'packaged weights, trained on rendered rooms: not for real images'


def choose_device(name: str) -> torch.device:
    """Return the torch device of the setting `device`; raise ParameterError if there is none."""
    if name == 'auto':
        return torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device('meta')
    if device.type not in ('cpu', 'cuda'):
        raise ParameterError(f"parameter 'device' is '{name}': use auto, cpu, cuda or cuda:N")
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        raise ParameterError(
            f"parameter 'device' is '{name}', but torch {torch.__version__} sees "
            f'{torch.cuda.device_count()} CUDA devices: use auto or cpu'
        )
    return device
