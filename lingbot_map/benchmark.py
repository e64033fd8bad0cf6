"""Measure the engine on noise: python3 -m lingbot_map.benchmark. Prints, judges nothing."""

import argparse
from collections.abc import Sequence
import platform
import sys
import time

from lingbot_map.checkpoint import CheckpointError, default_dtype, load_model, set_trunk_dtype
from lingbot_map.config import MODEL_PRESETS, StreamConfig
from lingbot_map.engine import StreamEngine
from lingbot_map.recipe import fill_model
import numpy as np
import torch


def measure(engine: StreamEngine, args: argparse.Namespace) -> tuple[float, np.ndarray]:
    """Return milliseconds of the scale batch and of each later frame, image in to pose out."""
    rng = np.random.default_rng(0)
    shape = (args.image_height, args.image_width, 3)
    times = []
    for _ in range(args.num_scale_frames + args.frames):
        rgb = rng.integers(0, 256, shape, dtype=np.uint8)
        start = time.perf_counter()
        engine.push(rgb)
        if args.device.type == 'cuda':
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[args.num_scale_frames - 1], np.array(times[args.num_scale_frames :])


def build(args: argparse.Namespace) -> StreamEngine:
    """Return a warm engine with the weights that were asked for."""
    dtype = getattr(torch, args.dtype) if args.dtype != 'auto' else default_dtype(args.device)
    if args.weights == 'recipe':
        model = load_model(args.model, 'random', args.device)
        fill_model(model)
        set_trunk_dtype(model, dtype)
    else:
        model = load_model(args.model, args.weights, args.device, dtype)
    config = StreamConfig(
        image_width=args.image_width,
        sliding_window=args.sliding_window,
        num_scale_frames=args.num_scale_frames,
        keyframe_interval=args.keyframe_interval,
        max_keyframes=args.max_keyframes,
        on_limit='reset',
    )
    engine = StreamEngine(model, config, args.device)
    engine.warm_up(args.image_height, args.image_width)
    return engine


def report(args: argparse.Namespace, ready_s: float, scale_ms: float, frame_ms: np.ndarray) -> str:
    """Return what was measured, one figure a line."""
    on_cuda = args.device.type == 'cuda'
    device = torch.cuda.get_device_name(args.device) if on_cuda else platform.processor() or 'cpu'
    last = frame_ms[-max(len(frame_ms) // 5, 1) :]
    lines = [
        f'{args.model} model, {args.weights or "packaged"} weights, {args.image_width}x'
        f'{args.image_height}, window {args.sliding_window}, keyframe interval '
        f'{args.keyframe_interval}, {args.dtype}, torch {torch.__version__}, {device}',
        f'weights to ready        {ready_s:9.1f} s',
        f'scale batch of {args.num_scale_frames:<9d}{scale_ms:9.1f} ms',
        *(f'frame p{q:<17d}{np.percentile(frame_ms, q):9.1f} ms' for q in (50, 95, 99)),
        f'last fifth, median      {np.median(last):9.1f} ms  ({1e3 / np.median(last):.1f} Hz)',
    ]
    if on_cuda:
        lines.append(f'peak GPU memory         {torch.cuda.max_memory_allocated() / 1e9:9.2f} GB')
    return '\n'.join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure, print; return 0, or 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog='python3 -m lingbot_map.benchmark', description=__doc__)
    parser.add_argument('--model', choices=MODEL_PRESETS, default='full')
    parser.add_argument(
        '--weights', default='random', help="random, recipe, a file, or '' for packaged ones"
    )
    parser.add_argument('--image-width', type=int, default=518)
    parser.add_argument('--image-height', type=int, default=378)
    parser.add_argument('--frames', type=int, default=100, help='after the scale batch')
    parser.add_argument('--sliding-window', type=int, default=64)
    parser.add_argument('--num-scale-frames', type=int, default=8)
    parser.add_argument('--keyframe-interval', type=int, default=1)
    parser.add_argument('--max-keyframes', type=int, default=320)
    parser.add_argument(
        '--dtype', choices=('auto', 'bfloat16', 'float16', 'float32'), default='auto'
    )
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(arguments)
    if args.frames < 1:
        parser.error(f'--frames is {args.frames}: give at least 1')
    start = time.perf_counter()
    try:
        args.device = torch.device(args.device)
        engine = build(args)
    except (CheckpointError, ValueError, RuntimeError, AssertionError) as error:
        sys.stderr.write(f'error: {error}\n')
        return 2
    ready_s = time.perf_counter() - start
    sys.stdout.write(report(args, ready_s, *measure(engine, args)) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
