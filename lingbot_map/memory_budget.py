"""Print what a stream will take of the memory of its device; no device is needed for that."""

import argparse
from collections.abc import Sequence
import sys

from lingbot_map.cli import Parser
from lingbot_map.config import (
    COMPILE_MODES,
    DTYPES,
    HEADS_DTYPES,
    LIMIT_POLICIES,
    MODEL_PRESETS,
    PRESET_IMAGE_WIDTH,
    StreamConfig,
)
from lingbot_map.streaming.budget import (
    blank_model,
    check_memory,
    GB,
    memory_limit,
    MemoryBudget,
    MemoryLimitError,
    predict,
)
from lingbot_map.streaming.compiling import Device, resolve
import torch

_GPU = Device('cuda', capability=(8, 0))  # the memory does not depend on which


def report(budget: MemoryBudget) -> str:
    """Return the table of a budget, one figure a line."""
    width, height = budget.size
    rows = [*budget.rows(), ('total', budget.total)]
    lines = [f'tokens per frame {budget.tokens:12d}  ({width}x{height} pixels)']
    lines += [f'{name:<20} {size / GB:8.2f} GB' for name, size in rows]
    return '\n'.join(lines) + '\n1 GB is 1e9 bytes.\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Print; return 0, or 1 if it is more than the limit, or 2 for a wrong argument."""
    parser = _parser()
    args = parser.parse_args(arguments)
    for flag in ('--image-width', '--image-height', '--gpu-memory-limit'):
        value = getattr(args, flag[2:].replace('-', '_'))
        if not value >= 0:
            parser.error(f'{flag} is {value}: it must be at least 0')
    width = args.image_width or PRESET_IMAGE_WIDTH[args.model]
    height = args.image_height or width * 3 // 4
    try:
        config = StreamConfig(
            image_width=width,
            num_scale_frames=args.num_scale_frames,
            sliding_window=args.sliding_window,
            max_keyframes=args.max_keyframes,
            on_limit=args.on_limit,
            overlap_keyframes=args.overlap_keyframes,
        )
        dtype = getattr(torch, args.dtype)
        mode = resolve(args.compile_mode, 'auto', _GPU, dtype).compile_mode
        model = blank_model(args.model, dtype, args.heads_dtype, mode)
        sys.stdout.write(report(predict(model, config, height, width)))
        limit = memory_limit(args.gpu_memory_limit, torch.device('cpu'))
        check_memory(model, config, height, width, limit)
    except MemoryLimitError as error:
        sys.stderr.write(f'error: {error}\n')
        return 1
    except ValueError as error:
        sys.stderr.write(f'error: {error}\n')
        return 2
    return 0


def _parser() -> Parser:
    defaults = StreamConfig()
    parser = Parser(
        prog='python3 -m lingbot_map.memory_budget',
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add('--model', choices=MODEL_PRESETS, default='full', help='architecture')
    add('--image-width', type=int, default=0, help="of the network's input, 0: the model's own")
    add('--image-height', type=int, default=0, help="of the network's input, 0: 3/4 of the width")
    for name in ('num_scale_frames', 'sliding_window', 'max_keyframes', 'overlap_keyframes'):
        flag = '--' + name.replace('_', '-')
        add(flag, type=int, default=getattr(defaults, name), help='as the parameter of the node')
    add('--on-limit', choices=LIMIT_POLICIES, default=defaults.on_limit, help='with max_keyframes')
    add('--dtype', choices=DTYPES[1:], default='bfloat16', help='precision of the trunk')
    add('--heads-dtype', choices=HEADS_DTYPES, default='tf32', help='precision of the heads')
    add('--compile-mode', choices=COMPILE_MODES, default='auto', help='auto: as on a GPU')
    add('--gpu-memory-limit', type=float, default=0.0, help='GB that must do, 0: none')
    return parser


if __name__ == '__main__':
    sys.exit(main())
