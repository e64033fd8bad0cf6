"""
Compare this package with a folder of golden data and say how far apart they are.

One line per setting, a summary at the end. Exit code 0: all within the limits; 1: something past
a limit; 2: nothing to compare; 3: something is not implemented that --skip does not name.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
import math
from pathlib import Path
import sys

from golden_folder import GoldenError, GoldenFolder, Setting
from golden_modules import module_settings
from golden_network import network_settings
from golden_pieces import piece_settings
import torch

PARTS = (
    'manifest',
    'tables',
    'pose',
    'preprocess',
    'visibility',
    'modules',
    'streaming',
    'special',
    'plain',
    'windowed',
    'full_size',
)
OK, DIFFERS, FAILED, MISSING = 'ok', 'expected-different', 'FAILED', 'not implemented'


def list_settings(golden: GoldenFolder, full_size: bool = False) -> list[Setting]:
    """Return everything that can be compared with the files that the folder has."""
    return [
        *piece_settings(golden),
        *network_settings(golden),
        *module_settings(golden, full_size),
    ]


def judge(setting: Setting) -> tuple[str, str]:
    """Run a setting and return its verdict and the numbers behind it, for one line."""
    try:
        deviations = setting.run()
    except NotImplementedError as missing:
        return MISSING, str(missing)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = ' '.join(str(error).split())
        return FAILED, f'{type(error).__name__}: {message}'
    numbers = '  '.join(map(str, deviations))
    past = any(deviation.past for deviation in deviations)
    if setting.shows_defect:
        finite = all(math.isfinite(deviation.largest) for deviation in deviations)
        return (DIFFERS if past and finite else FAILED), numbers
    return (FAILED if past else OK), numbers


def use_full_precision() -> None:
    """Keep float32 products in float32 on every device."""
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = False


def check(settings: list[Setting], report: Callable[[str], None]) -> int:
    """Run the settings, report a line for each and a summary, and return the exit code."""
    verdicts: Counter[str] = Counter()
    for setting in settings:
        verdict, numbers = judge(setting)
        verdicts[verdict] += 1
        report(f'{setting.part:10} {setting.name:32} {verdict:18} {numbers}')
    summary = ', '.join(f'{number} {verdict}' for verdict, number in verdicts.items())
    report(f'{len(settings)} settings: {summary or "none was run"}')
    if verdicts[FAILED]:
        return 1
    if verdicts[MISSING]:
        return 3
    return 0 if settings else 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('folder', type=Path, metavar='DIR', help='folder of golden data')
    parser.add_argument(
        '--prefix', help='of the files of one model, PREFIX_config.json and so on (default: tiny)'
    )
    parser.add_argument(
        '--device', choices=('cpu', 'cuda'), default='cpu', help='cuda: ten times the tolerance'
    )
    parser.add_argument(
        '--full-size',
        action='store_true',
        help='also run the model of 1.16 G parameters (needs 7 GB)',
    )
    parser.add_argument(
        '--skip',
        choices=PARTS,
        action='append',
        default=[],
        help='leave a part out; may be repeated',
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.device == 'cuda' and not torch.cuda.is_available():
        sys.stderr.write('--device cuda: torch finds no CUDA device; use --device cpu\n')
        return 2
    use_full_precision()
    golden = GoldenFolder(arguments.folder, arguments.prefix or 'tiny', arguments.device)
    try:
        if not golden.path.is_dir():
            raise GoldenError('no such folder')
        if arguments.prefix and not golden.config:
            raise GoldenError(f'no {golden.prefix}_config.json; check --prefix')
        settings = list_settings(golden, arguments.full_size)
    except (GoldenError, LookupError, TypeError, OSError) as error:
        sys.stderr.write(f'cannot read {arguments.folder}: {error}\n')
        return 2
    chosen = [setting for setting in settings if setting.part not in arguments.skip]
    return check(chosen, partial(print, flush=True))


if __name__ == '__main__':
    sys.exit(main())
