"""
Streaming against one masked pass over the whole sequence.

The reference below is plain float64 arithmetic on the weights, with no cache: all frames go
through every layer at once, and a mask built from the visibility rules (spec section 8) says who
sees whom.
"""

from dataclasses import dataclass
import math

from lingbot_map.benchmark.recipe import fill_model
from lingbot_map.models.gct_stream import GCTStream
import pytest
import torch
from torch.nn import functional as F

MODEL = {
    'embed_dim': 128, 'num_heads': 2, 'depth': 4, 'selected_layers': (0, 1, 2, 3),
    'vit_depth': 1, 'vit_num_heads': 2, 'img_size': 56, 'camera_trunk_depth': 2,
    'camera_num_heads': 2, 'camera_num_iterations': 2, 'enable_depth': False,
}  # fmt: skip
PATCH, SPECIALS, HEIGHT, WIDTH, FRAMES = 14, 6, 28, 42, 11


@dataclass(frozen=True)
class Rules:
    """What decides visibility: kept frames, their temporal index, and the window."""

    batch: int
    anchors: int
    window: int
    interval: int

    def kept(self, frame: int) -> bool:
        return frame < self.batch or (frame - self.batch) % self.interval == 0

    def index(self, frame: int) -> int:
        """Return how many frames were kept before this one."""
        return sum(self.kept(earlier) for earlier in range(frame))

    def sees(self, frame: int) -> tuple[list[int], list[int]]:
        """Return the frames whose patches, and those whose specials, this frame's queries see."""
        if frame < self.batch > 1:
            return list(range(self.batch)), list(range(self.batch))
        older = [earlier for earlier in range(frame) if self.kept(earlier)]
        if self.kept(frame):
            older.append(frame)
        after = older[self.anchors :]
        resident = older[: self.anchors] + after[max(len(after) - self.window, 0) :]
        own = [] if self.kept(frame) else [frame]
        return resident + own, older + own


def linear(w, name, x):
    return x @ w[f'{name}.weight'].T + w[f'{name}.bias']


def norm(w, name, x, eps):
    return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'], eps)


def attention(w, name, x, heads, mask, turn):
    """Return attended tokens (N, C); token i sees token j where mask (N, N) is true."""
    q, k, v = linear(w, f'{name}.qkv', x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
    if f'{name}.q_norm.weight' in w:
        q, k = norm(w, f'{name}.q_norm', q, 1e-5), norm(w, f'{name}.k_norm', k, 1e-5)
    q, k = turn(q), turn(k)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return linear(w, f'{name}.proj', (weights @ v).transpose(0, 1).reshape(x.shape))


def unturned(x):
    return x


def block(w, name, x, heads, mask, turn=unturned, eps=1e-5):
    normed = norm(w, f'{name}.norm1', x, eps)
    x = x + w[f'{name}.ls1.gamma'] * attention(w, f'{name}.attn', normed, heads, mask, turn)
    hidden = F.gelu(linear(w, f'{name}.mlp.fc1', norm(w, f'{name}.norm2', x, eps)))
    return x + w[f'{name}.ls2.gamma'] * linear(w, f'{name}.mlp.fc2', hidden)


def turn_2d(positions):
    """Return a function that rotates by (y, x): half the channels each, i pairs with i + n / 2."""

    def turn(x):
        halves = []
        for half, position in zip(x.chunk(2, -1), positions.T, strict=True):
            n = half.shape[-1]
            angle = position[:, None] * 100.0 ** (-torch.arange(0, n, 2).double() / n)
            a, b = half.chunk(2, -1)
            halves += [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
        return torch.cat(halves, -1)

    return turn


def turn_3d(positions, budgets):
    """Return a function that rotates by (t, y, x): complex pairs of neighbouring channels."""
    angles = torch.cat(
        [
            position[:, None] * 10000.0 ** (-torch.arange(0, n, 2).double() / n)
            for n, position in zip(budgets, positions.T, strict=True)
        ],
        -1,
    )
    factor = torch.polar(torch.ones_like(angles), angles)
    return lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * factor
    ).flatten(-2)


def encode(w, image):
    """Return the patch tokens (Np, C) of one image (3, H, W)."""
    name = 'aggregator.patch_embed'
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).double()
    pixels = ((image.double() - mean[:, None, None]) / std[:, None, None])[None]
    patches = F.conv2d(
        pixels,
        w[f'{name}.patch_embed.proj.weight'],
        w[f'{name}.patch_embed.proj.bias'],
        stride=PATCH,
    )
    table = w[f'{name}.pos_embed'][0]
    grid = table[1:].float().T.reshape(1, -1, 4, 4)
    grid = F.interpolate(grid, patches.shape[-2:], mode='bicubic', antialias=True).double()
    x = torch.cat(
        (
            w[f'{name}.cls_token'][0] + table[:1],
            w[f'{name}.register_tokens'][0],
            (patches + grid)[0].flatten(1).T,
        )
    )
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    for i in range(MODEL['vit_depth']):
        x = block(w, f'{name}.blocks.{i}', x, MODEL['vit_num_heads'], everything, eps=1e-6)
    return norm(w, f'{name}.norm', x, 1e-6)[5:]


def all_tokens(w, images, rules):
    """Return the tokens (S * P, C) that enter the trunk."""
    tokens = []
    for frame, image in enumerate(images):
        later = min(rules.index(frame), 1)
        unscaled = int(rules.index(frame) >= rules.batch)
        tokens += [
            w['aggregator.camera_token'][0, later],
            w['aggregator.register_token'][0, later],
            w['aggregator.scale_token'][0, unscaled],
            encode(w, image),
        ]
    return torch.cat(tokens)


def positions_of_tokens(rules, rows, columns):
    """Return (y, x) for the frame blocks and (t, y, x) for the global blocks, (S * P, ...)."""
    local, everywhere = [], []
    for frame in range(FRAMES):
        t = rules.index(frame)
        local += [(0, 0)] * SPECIALS
        everywhere += [(t, s, s) for s in range(SPECIALS)]
        for y in range(rows):
            local += [(y + 1, x + 1) for x in range(columns)]
            everywhere += [(t, SPECIALS + y, SPECIALS + x) for x in range(columns)]
    return torch.tensor(local).double(), torch.tensor(everywhere).double()


def masks(rules, patches):
    """Return who sees whom inside frames, across frames, and among camera tokens."""
    tokens = SPECIALS + patches
    across = torch.zeros(FRAMES, tokens, FRAMES, tokens, dtype=torch.bool)
    camera = torch.zeros(FRAMES, FRAMES, dtype=torch.bool)
    for frame in range(FRAMES):
        of_patches, of_specials = rules.sees(frame)
        across[frame, :, of_patches, SPECIALS:] = True
        across[frame, :, of_specials, :SPECIALS] = True
        camera[frame, of_specials] = True  # the camera head never evicts either
    inside = torch.eye(FRAMES, dtype=torch.bool).repeat_interleave(tokens, 0)
    return inside.repeat_interleave(tokens, 1), across.flatten(2).flatten(0, 1), camera


def camera_head(w, x, mask, turn):
    """Return pose encodings (S, 9) of camera tokens (S, D)."""
    heads, raw = MODEL['camera_num_heads'], None
    z = norm(w, 'camera_head.token_norm', x, 1e-5)
    plain = F.layer_norm(z, z.shape[-1:], eps=1e-6)
    for _ in range(MODEL['camera_num_iterations']):
        pose = w['camera_head.empty_pose_tokens'][0] if raw is None else raw
        condition = F.silu(linear(w, 'camera_head.embed_pose', pose))
        condition = linear(w, 'camera_head.poseLN_modulation.1', condition)
        shift, scale, gate = condition.chunk(3, -1)
        y = gate * (plain * (1 + scale) + shift) + z
        for i in range(MODEL['camera_trunk_depth']):
            y = block(w, f'camera_head.trunk.{i}', y, heads, mask, turn)
        y = norm(w, 'camera_head.trunk_norm', y, 1e-5)
        hidden = linear(w, 'camera_head.pose_branch.fc1', y)
        delta = linear(w, 'camera_head.pose_branch.fc2', F.gelu(hidden))
        raw = delta if raw is None else raw + delta
    return torch.cat((raw[:, :7], raw[:, 7:].relu()), -1)


def masked_pass(model, images, rules, options, camera_cache=True):
    """Return every layer's tokens (S, P, 2C), a list, and pose encodings (S, 9)."""
    w = {key: value.double() for key, value in model.state_dict().items()}
    rows, columns = HEIGHT // PATCH, WIDTH // PATCH
    inside, across, camera = masks(rules, rows * columns)
    if not camera_cache:
        camera = torch.eye(FRAMES, dtype=torch.bool)
    local, everywhere = positions_of_tokens(rules, rows, columns)
    frame_turn = turn_2d(local)
    global_turn = turn_3d(everywhere, (20, 22, 22)) if options['enable_3d_rope'] else frame_turn
    if options.get('disable_global_rope'):
        global_turn = unturned
    x = all_tokens(w, images, rules)
    layers = []
    for i in range(MODEL['depth']):
        x = block(w, f'aggregator.frame_blocks.{i}', x, MODEL['num_heads'], inside, frame_turn)
        frame_part = x
        x = block(w, f'aggregator.global_blocks.{i}', x, MODEL['num_heads'], across, global_turn)
        layers.append(torch.cat((frame_part, x), -1).unflatten(0, (FRAMES, -1)))
    camera_turn = unturned
    if options.get('enable_camera_3d_rope'):
        index = torch.tensor([[rules.index(frame), 0, 0] for frame in range(FRAMES)]).double()
        camera_turn = turn_3d(index, (40, 44, 44))
    return layers, camera_head(w, layers[-1][:, 0], camera, camera_turn)


def streamed(model, images, rules):
    """Return the same from the model, fed frame by frame."""
    calls = []
    handle = model.aggregator.register_forward_hook(lambda _m, _args, out: calls.append(out))
    outputs = model.inference_streaming(images, rules.batch, rules.interval)
    handle.remove()
    layers = [torch.cat(parts, 1)[0] for parts in zip(*calls, strict=True)]
    return layers, outputs['pose_enc'][0]


def build(rules, options):
    model = GCTStream.from_config(
        {
            **MODEL,
            **options,
            'kv_cache_scale_frames': rules.anchors,
            'kv_cache_sliding_window': rules.window,
        }
    )
    fill_model(model, 'masked reference')
    generator = torch.Generator().manual_seed(5)
    return model.eval(), torch.rand(FRAMES, 3, HEIGHT, WIDTH, generator=generator)


@pytest.mark.parametrize(
    ('rules', 'options'),
    [
        (Rules(3, 3, 2, 1), {'enable_3d_rope': True}),
        (Rules(3, 3, 2, 2), {'enable_3d_rope': True}),
        (Rules(1, 1, 1, 3), {'enable_3d_rope': True}),
        (Rules(2, 4, 1, 2), {'enable_3d_rope': True, 'enable_camera_3d_rope': True}),
        (Rules(5, 2, 3, 2), {'enable_3d_rope': True}),
        (Rules(3, 3, 0, 2), {'enable_3d_rope': True}),
        (Rules(2, 2, 64, 1), {'enable_3d_rope': False}),
        (Rules(3, 3, 2, 2), {'enable_3d_rope': True, 'disable_global_rope': True}),
    ],
    ids=str,
)
def test_masked_pass_equals_streaming(rules, options):
    model, images = build(rules, options)
    layers, poses = masked_pass(model, images, rules, options)
    streamed_layers, streamed_poses = streamed(model, images, rules)
    for layer, streamed_layer in zip(layers, streamed_layers, strict=True):
        torch.testing.assert_close(streamed_layer.double(), layer, atol=2e-5, rtol=0)
    torch.testing.assert_close(streamed_poses.double(), poses, atol=1e-5, rtol=0)


WRONG = [Rules(3, 3, 3, 2), Rules(3, 2, 2, 2), Rules(3, 3, 2, 3)]


@pytest.mark.parametrize('wrong', WRONG, ids=str)
def test_reference_notices_other_visibility(wrong):
    options = {'enable_3d_rope': True}
    model, images = build(Rules(3, 3, 2, 2), options)
    _, poses = masked_pass(model, images, wrong, options)
    _, streamed_poses = streamed(model, images, Rules(3, 3, 2, 2))
    assert (streamed_poses - poses).abs().max() > 1e-3


def test_camera_head_uses_its_cache():
    rules, options = Rules(1, 1, 2, 2), {'enable_3d_rope': True}
    model, images = build(rules, options)
    _, without_cache = masked_pass(model, images, rules, options, camera_cache=False)
    difference = (streamed(model, images, rules)[1] - without_cache).abs().amax(1)
    assert difference[0] < 1e-5
    assert difference[1:].min() > 1e-4


@pytest.mark.parametrize('interval', [1, 2, 3])
def test_only_keyframes_stay_in_memory(interval):
    rules = Rules(2, 2, 64, interval)
    model, images = build(rules, {'enable_3d_rope': True})
    model.inference_streaming(images, rules.batch, interval)
    assert model.memory.kept == 2 + math.ceil((FRAMES - 2) / interval)
    assert model.get_kv_cache_info()['num_cached_blocks'] == MODEL['depth']
    model.clean_kv_cache()
    assert model.memory.kept == 0
