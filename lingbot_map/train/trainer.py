"""Trainer: one training process with its batches, updates, validation and state."""

import dataclasses
from dataclasses import dataclass, replace
from functools import partial

from lingbot_map.config import DEMO_STREAM
from lingbot_map.geometry import decode_pose
from lingbot_map.layers.attention import attend_masked
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.synthetic.rendering import Clip, render_clips
from lingbot_map.synthetic.rooms import FIRST_TRAINING_SEED, RoomConfig, VALIDATION_SEEDS
from lingbot_map.train.attention import (
    dense_attention,
    FlexAttention,
    forward_sequence,
    Visibility,
    visibility,
)
from lingbot_map.train.evaluation import RoomScore, score_arrays
from lingbot_map.train.losses import depth_loss, log_of, make_targets, pose_loss
from lingbot_map.train.muon import make_optimisers
import torch
from torch import distributed, Tensor

LEARNING_RATE = 0.02
WARM_UP_STEPS = 200
ANNEAL_FROM = 0.45  # share of the run after which the learning rate decreases
EMA_DECAY = 0.999
CLIP_NORM = 1.0
DEPTH_WEIGHT = 2.0
RENDERED_BATCHES = 2  # rendered together, which is nearly as fast as one
DEPTH_SHARE = 8  # the depth loss uses one of this many frames per step
VALIDATION_ROOMS = 8


@dataclass(frozen=True)
class Stage:
    """A part of the run, with its clip length."""

    until: float  # share of the run
    frames: int
    mean_step: tuple[float, float]  # [m] range of a clip's mean step
    frames_per_batch: int = 768  # per GPU

    @property
    def clips(self) -> int:
        return self.frames_per_batch // self.frames


# Short clips with large steps first, then clips as long as those of the test set.
STAGES = (Stage(0.4, 24, (0.06, 0.2)), Stage(1.0, 64, (0.05, 0.11)))


def stages(clip_frames: int | None) -> tuple[Stage, ...]:
    """Return STAGES; with `clip_frames` only the last stage, with clips of that length."""
    if clip_frames is None:
        return STAGES
    return (replace(STAGES[-1], frames=clip_frames),)


class Trainer:
    """Model, optimisers, averaged weights and progress; see `state` and `load` to resume."""

    def __init__(self, model: GCTStream, device: torch.device):
        self.model, self.device = model.to(device), device
        self.model.requires_grad_(True)
        self.model.depth_head.frames_per_chunk = 512  # throughput matters here, not memory
        self.model.aggregator.patch_embed.mask_token.requires_grad_(False)  # unused
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.world = distributed.get_world_size() if distributed.is_initialized() else 1
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimisers = make_optimisers(model, LEARNING_RATE)
        self.average = [p.detach().clone() for p in self.parameters]
        self.step, self.seconds = 0, 0.0
        self.attention = _attention_factory(model, device)

    def train_step(self, stage: Stage, rate: float) -> Tensor:
        """
        Render RENDERED_BATCHES batches, do two updates with each and return the mean losses.

        The second update uses the batch mirrored and in reverse order.
        """
        number = RENDERED_BATCHES * stage.clips
        first = FIRST_TRAINING_SEED + (self.step * self.world + self.rank) * number
        config = RoomConfig(num_frames=stage.frames, mean_step=stage.mean_step)
        rendered = render_clips(range(first, first + number), config, self.device)
        self.step += 1
        batches = [
            Clip(*fields)
            for fields in zip(
                *(
                    getattr(rendered, field.name).split(stage.clips)
                    for field in dataclasses.fields(Clip)
                ),
                strict=True,
            )
        ]
        losses = [
            self._update(variant, rate)
            for clip in batches
            for variant in (clip, mirrored_backwards(clip))
        ]
        return torch.stack(losses).mean(0)

    def _update(self, clip: Clip, rate: float) -> Tensor:
        seen, scale_frames = random_visibility(clip.depth.shape[1])
        target = make_targets(clip)
        pose_enc_list, depth, confidence, chosen = self._forward(clip, seen, scale_frames)
        pose = pose_loss(pose_enc_list, target)
        dense = depth_loss(log_of(depth), confidence, target.log_depth[:, chosen])
        (pose + DEPTH_WEIGHT * dense).backward()
        self._apply(rate)
        return torch.stack((pose.detach(), dense.detach()))

    def _forward(self, clip: Clip, seen: Visibility, scale_frames: int):
        images = clip.rgb.float() / 255
        seen = Visibility(*(x.to(self.device) for x in (seen.patches, seen.specials, seen.index)))
        attend = self.attention(images, seen)
        model, frames = self.model, images.shape[1]
        chosen = torch.randperm(frames)[: frames // DEPTH_SHARE + 1].sort().values.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == 'cuda'):
            selected = model.aggregator(
                images, seen.index, scale_frames, lambda _layer, q, k, v: attend(q, k, v)
            )
        poses = model.camera_head(
            selected[-1][:, :, 0].float(),
            seen.index,
            lambda _iteration, _block, q, k, v: attend_masked(q, k, v, seen.specials),
        )
        dense = model.dense([layer[:, chosen].float() for layer in selected], images.shape[-2:])
        return poses, dense['depth'], dense['depth_conf'], chosen

    def _apply(self, rate: float) -> None:
        gradients = [p.grad for p in self.parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self.world > 1:
            distributed.all_reduce(flat, distributed.ReduceOp.AVG)
        # Replace a non-finite gradient by zero, so that one bad batch does not end the run.
        norm = flat.norm()
        flat = torch.where(norm.isfinite(), flat * (CLIP_NORM / norm.clamp(min=CLIP_NORM)), 0)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(
            gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        )
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group['lr'] = rate * group.setdefault('initial_lr', group['lr'])
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def validate(self) -> list[RoomScore]:
        """Return the scores of the averaged weights on validation rooms, one masked pass each."""
        current = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.average)
        clip = render_clips(VALIDATION_SEEDS[:VALIDATION_ROOMS], RoomConfig(), self.device)
        seen = visibility(
            64, 8, 8, DEMO_STREAM['sliding_window'], DEMO_STREAM['keyframe_interval']
        )
        seen = Visibility(*(x.to(self.device) for x in (seen.patches, seen.specials, seen.index)))
        images, scores = clip.rgb.float() / 255, []
        with torch.compiler.set_stance('force_eager'):
            for room in range(VALIDATION_ROOMS):
                attend = dense_attention(self.model, images, seen)
                out = forward_sequence(self.model, images[room : room + 1], seen, 8, attend)
                scores.append(
                    score_arrays(
                        decode_pose(out['pose_enc'][0].double().cpu(), 1, 1)[0].numpy(),
                        clip.T_world_cam[room].double().cpu().numpy(),
                        out['depth'][0, ..., 0],
                        clip.depth[room],
                    )
                )
        torch._foreach_copy_(self.parameters, current)
        return scores

    def weights(self) -> dict[str, Tensor]:
        """Return the averaged weights by name, in float16."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        weights = self.model.state_dict() | dict(zip(names, self.average, strict=True))
        return {name: value.half().cpu().contiguous() for name, value in weights.items()}

    def state(self) -> dict:
        """Return everything that is needed to resume."""
        return {
            'model': [p.detach() for p in self.parameters],
            'average': self.average,
            'optimisers': [o.state_dict() for o in self.optimisers],
            'step': self.step,
            'seconds': self.seconds,
        }

    def load(self, state: dict) -> None:
        """Resume from `state` of an earlier call."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, [x.to(self.device) for x in state['model']])
            torch._foreach_copy_(self.average, [x.to(self.device) for x in state['average']])
        for optimiser, saved in zip(self.optimisers, state['optimisers'], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.seconds = state['step'], state['seconds']


def random_visibility(frames: int) -> tuple[Visibility, int]:
    """Return the masks of a stream with random settings, and the size of its scale batch."""

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), ()))]

    scale_frames = pick(1, 2, 4, 6, 8, 8, 8)
    return visibility(
        frames, scale_frames, scale_frames, pick(8, 12, 16, 16, 24), pick(1, 2, 2, 3)
    ), scale_frames


def mirrored_backwards(clip: Clip) -> Clip:
    """Mirror the clip and reverse its frames; the result is another valid room and path."""
    flip = torch.diag(torch.tensor([-1.0, 1, 1, 1], device=clip.rgb.device))

    def mirror(image: Tensor) -> Tensor:
        # With cx = W / 2, pixel u maps to W - u: column 0 has no source and repeats column 1.
        flipped = image.flip(1, -1)
        return torch.cat((flipped[..., :1], flipped[..., :-1]), -1)

    return Clip(
        mirror(clip.rgb),
        mirror(clip.depth),
        (flip @ clip.T_world_cam @ flip).flip(1),
        clip.K.flip(1),
    )


def learning_rate(share: float, step: int, peak: float) -> float:
    """Return the factor on LEARNING_RATE after a share of the run."""
    fall = min(1.0, (1 - share) / (1 - ANNEAL_FROM))
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * max(fall, 0.01)


def initialise(model: GCTStream) -> None:
    """Initialise for training: smaller residual branches, and a plausible initial pose."""
    depth = 2 * len(model.aggregator.global_blocks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(('attn.proj.weight', 'mlp.fc2.weight')):
                parameter.mul_(depth**-0.5)
        model.camera_head.pose_branch.fc2.bias.copy_(
            torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 0.8, 1.2]) / model.camera_head.iterations
        )


def _attention_factory(model: GCTStream, device: torch.device):
    """Return a function of (images, seen) that returns `attend_tokens`; compile on CUDA."""
    if device.type != 'cuda':
        return partial(dense_attention, model)
    for block in (*model.aggregator.patch_embed.blocks, *model.aggregator.frame_blocks):
        block.forward = torch.compile(block.forward, dynamic=False)
    for block in model.aggregator.global_blocks:
        block.attn_pre = torch.compile(block.attn_pre, dynamic=False)
        block.ffn_residual = torch.compile(block.ffn_residual, dynamic=False)
    return FlexAttention(model, device).bind
