"""Print how much memory a stream needs on its device; works without that device."""

from collections.abc import Sequence
from dataclasses import replace
import sys

from lingbot_map.cli import Parser
from lingbot_map.config import (
    DTYPES,
)
from lingbot_map.errors import UserError
from lingbot_map.settings import (
    add_flag,
    build,
    EngineSettings,
    specs_of,
    stream_config,
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

_SETTINGS = (
    'model',
    'image_width',
    'num_scale_frames',
    'sliding_window',
    'max_keyframes',
    'on_limit',
    'overlap_keyframes',
    'dtype',
    'heads_dtype',
    'compile_mode',
    'gpu_memory_limit',
)
_HERE = {  # what differs from the node: there is no device
    'model': {'default': 'full'},
    'dtype': {
        'default': 'bfloat16',
        'choices': DTYPES[1:],
        'description': 'Precision of the trunk.',
    },
    'compile_mode': {'description': 'How the network runs. auto: as on a GPU.'},
    'gpu_memory_limit': {'description': 'Memory that must suffice. 0: no limit.'},
}
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
    if args.image_height < 0:
        parser.error(f'--image-height is {args.image_height}: it must be at least 0')
    try:
        settings = build(EngineSettings, vars(args))
        config = stream_config(settings)
        width = config.image_width
        height = args.image_height or width * 3 // 4
        dtype = getattr(torch, settings.dtype)
        mode = resolve(settings.compile_mode, 'auto', _GPU, dtype).compile_mode
        model = blank_model(settings.model, dtype, settings.heads_dtype, mode)
        sys.stdout.write(report(predict(model, config, height, width)))
        limit = memory_limit(settings.gpu_memory_limit, torch.device('cpu'))
        check_memory(model, config, height, width, limit)
    except MemoryLimitError as error:
        sys.stderr.write(f'error: {error}\n')
        return 1
    except UserError as error:
        sys.stderr.write(f'error: {error}\n')
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog='python3 -m lingbot_map.memory_budget',
        description=__doc__,
        epilog='Defaults in brackets.',
    )
    specs = specs_of(EngineSettings)
    for name in _SETTINGS:
        spec = replace(specs[name], **_HERE.get(name, {}))
        add_flag(parser, name, spec, choices=spec.choices or None)
    parser.add_argument(
        '--image-height',
        type=int,
        default=0,
        metavar='N',
        help='height of the network input. 0: 3/4 of its width [px] (0)',
    )
    return parser


if __name__ == '__main__':
    sys.exit(main())
