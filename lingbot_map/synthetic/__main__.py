"""Rendered rooms with exact depth, poses and intrinsics: training data, test set, sample bag."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
import sys

from lingbot_map.cli import Parser
from lingbot_map.errors import UserError
from lingbot_map.synthetic.bag import check_target, write_sample_bag
from lingbot_map.synthetic.paths import slowed
from lingbot_map.synthetic.rendering import render_clips, render_rooms
from lingbot_map.synthetic.rooms import (
    build_rooms,
    SAMPLE_CONFIG,
    SAMPLE_FRAMES,
    SAMPLE_SEED,
    TEST_CONFIG,
    TEST_SEEDS,
)
from PIL import Image
import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a preview of the test set, write the sample bag; return 0 or 1."""
    parser = Parser(prog='python3 -m lingbot_map.synthetic', description=__doc__)
    parser.add_argument('--preview', type=Path, metavar='PNG', help='draw the test set')
    parser.add_argument('--bag', type=Path, metavar='FOLDER', help='write the sample bag')
    options = parser.parse_args(arguments)
    if not (options.preview or options.bag):
        parser.error('give --preview PNG or --bag FOLDER')
    try:
        if options.preview:
            _write_preview(options.preview)
        if options.bag:
            _write_bag(options.bag)
        return 0
    except (UserError, OSError) as error:
        sys.stderr.write(f'error: {error}\n')
        return 1
    except KeyboardInterrupt:
        sys.stderr.write('interrupted\n')
        return 1


def _write_preview(path):
    rows = []
    for seed in TEST_SEEDS:
        clip = render_clips([seed], TEST_CONFIG, 'cpu')
        frames = clip.rgb[0, :: TEST_CONFIG.num_frames // 8]
        rows.append(frames.permute(2, 0, 3, 1).flatten(1, 2))
    try:
        Image.fromarray(torch.cat(rows).contiguous().numpy()).save(path)
    except ValueError as error:  # a suffix that Pillow does not know
        raise UserError(str(error)) from None


def _write_bag(path):
    check_target(path)  # fail before rendering, which takes a minute
    rooms = build_rooms([SAMPLE_SEED], SAMPLE_CONFIG, torch.device('cpu'))
    rooms = replace(rooms, T_world_cam=slowed(rooms.T_world_cam, SAMPLE_FRAMES))
    write_sample_bag(path, render_rooms(rooms, SAMPLE_CONFIG))
    sys.stdout.write(
        f'{path}: {SAMPLE_FRAMES} frames, '
        f'{sum(f.stat().st_size for f in path.iterdir()) / 1e6:.2f} MB\n'
    )


if __name__ == '__main__':
    sys.exit(main())
