"""
Train the `demo` preset on rendered rooms, or evaluate it: python3 -m lingbot_map.train.

Runs one process per GPU; use torchrun for several GPUs. The learning rate and the clip length are
functions of the elapsed share of `--minutes`, so that a run always ends with a low learning rate.
The full state is saved every minute for `--resume`; `--init` starts from weights only.
"""

import argparse
from dataclasses import replace
import os
from pathlib import Path
from pickle import UnpicklingError
import sys
import time

from lingbot_map.cli import Parser
from lingbot_map.errors import UserError
from lingbot_map.streaming.checkpoint import load_model
from lingbot_map.synthetic.rooms import TEST_CONFIG, TEST_SEEDS
from lingbot_map.train.attention import MAX_FRAMES
from lingbot_map.train.evaluation import evaluate_rooms, summary
from lingbot_map.train.trainer import initialise, learning_rate, STAGES, stages, Trainer
from safetensors.torch import save_file
import torch
from torch import distributed

SAVE_EVERY_S = 60
VALIDATE_EVERY_S = 180
REPORT_EVERY = 25  # steps
MIN_FRAMES = 16  # per clip: twice the scale batch


def train(args: argparse.Namespace) -> None:
    """Train until `--minutes` have elapsed in total, or `--slice-minutes` in this call."""
    device = _start_process()
    torch.set_float32_matmul_precision('high')
    torch.backends.cudnn.allow_tf32 = True
    model = load_model('demo', args.init or 'random', device)
    if not args.init:
        initialise(model)
    trainer = Trainer(model, device)
    state_file = args.out / 'state.pt'
    if args.resume:
        _resume(trainer, state_file)
    torch.manual_seed(1000 * trainer.step + trainer.rank)
    _run(trainer, args, state_file)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _resume(trainer: Trainer, file: Path) -> None:
    try:
        trainer.load(torch.load(file, map_location='cpu', weights_only=True))
    except (EOFError, LookupError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
        raise UserError(
            f"'{file}' is damaged or not a training state: start without --resume"
        ) from error


def _run(trainer: Trainer, args: argparse.Namespace, state_file: Path) -> None:
    plan = stages(args.clip_frames)
    total, start, before = 60 * args.minutes, time.monotonic(), trainer.seconds
    saved = validated = start
    losses, running = [], True
    while running:
        share = min(trainer.seconds / total, 1.0)
        stage = next(stage for stage in plan if share <= stage.until)
        losses.append(trainer.train_step(stage, learning_rate(share, trainer.step, args.peak)))
        now = time.monotonic()
        trainer.seconds, running = _shared_clock(
            trainer, before + now - start, min(total, before + 60 * args.slice_minutes)
        )
        if trainer.rank:
            continue
        if trainer.step % REPORT_EVERY == 0 or not running:
            pose, dense = torch.stack(losses).mean(0).tolist()
            losses.clear()
            _print(
                f'step {trainer.step}  {trainer.seconds / 60:.2f}/{args.minutes:g} min  '
                f'{stage.frames} frames  pose {pose:.4f}  depth {dense:.4f}'
            )
        if now - saved > SAVE_EVERY_S or not running:
            saved = now
            _save(trainer, args.out, state_file)
        if now - validated > VALIDATE_EVERY_S or not running:
            validated = now
            _print(summary(trainer.validate()))


def _shared_clock(trainer: Trainer, seconds: float, limit: float) -> tuple[float, bool]:
    """Return the time of process 0 and whether to continue, equal in all processes."""
    if trainer.world > 1:
        clock = torch.tensor(seconds, device=trainer.device, dtype=torch.float64)
        distributed.broadcast(clock, 0)
        seconds = clock.item()
    return seconds, seconds < limit


def _save(trainer: Trainer, out: Path, state_file: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(trainer.weights(), out / 'demo.safetensors')
    temporary = state_file.with_suffix('.tmp')
    torch.save(trainer.state(), temporary)
    temporary.rename(state_file)


def _start_process() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device('cpu')
    local = int(os.environ.get('LOCAL_RANK', 0))
    torch.cuda.set_device(local)
    if 'WORLD_SIZE' in os.environ:
        distributed.init_process_group('nccl')
    return torch.device('cuda', local)


def evaluate(args: argparse.Namespace) -> None:
    """Print the errors on the test rooms."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, scores = load_model('demo', args.init, device), []
    config = TEST_CONFIG
    if args.clip_frames:
        config = replace(config, num_frames=args.clip_frames)
    rooms = evaluate_rooms(model, TEST_SEEDS, device, config)
    for seed, score in zip(TEST_SEEDS, rooms, strict=True):
        scores.append(score)
        _print(
            f'room {seed}: ATE {score.ate_percent:.2f} %  rotation {score.rotation_deg:.2f} deg  '
            f'AbsRel {score.abs_rel:.3f}'
        )
    _print(summary(scores))


def _print(text: str) -> None:
    sys.stdout.write(text + '\n')
    sys.stdout.flush()


def main() -> None:
    parser = Parser(
        prog='python3 -m lingbot_map.train', description=__doc__.strip().splitlines()[0]
    )
    parser.add_argument(
        '--evaluate', action='store_true', help='print the errors on the test rooms'
    )
    parser.add_argument(
        '--minutes', type=float, default=20.0, help='duration of the whole run [min]'
    )
    parser.add_argument(
        '--slice-minutes',
        type=float,
        default=float('inf'),
        help='duration of this call [min]; continue with --resume',
    )
    parser.add_argument('--out', type=Path, default=Path('results/train'))
    parser.add_argument(
        '--init',
        default='',
        help="weights to start from; '' = random, with --evaluate the packaged ones",
    )
    parser.add_argument(
        '--clip-frames',
        type=int,
        help=f'images per clip, {MIN_FRAMES} to {MAX_FRAMES} in training; default: '
        f'{STAGES[0].frames}, then {STAGES[-1].frames}; with --evaluate {TEST_CONFIG.num_frames}',
    )
    parser.add_argument('--resume', action='store_true', help='continue from OUT/state.pt')
    parser.add_argument('--peak', type=float, default=1.0, help='factor on the learning rate')
    args = parser.parse_args()
    for name in ('minutes', 'slice_minutes', 'peak'):
        if not getattr(args, name) > 0:
            parser.error(
                f'--{name.replace("_", "-")} is {getattr(args, name)}: it must be above 0'
            )
    most = sys.maxsize if args.evaluate else MAX_FRAMES
    if args.clip_frames is not None and not MIN_FRAMES <= args.clip_frames <= most:
        parser.error(
            f'--clip-frames is {args.clip_frames}: use {MIN_FRAMES} to {MAX_FRAMES}, '
            'or more with --evaluate'
        )
    try:
        if not args.evaluate:
            args.out.mkdir(parents=True, exist_ok=True)  # fail before the training
        evaluate(args) if args.evaluate else train(args)
    except (UserError, OSError) as error:
        raise SystemExit(f'lingbot_map.train: {error}') from error
    except KeyboardInterrupt:
        raise SystemExit('lingbot_map.train: interrupted') from None


if __name__ == '__main__':
    main()
