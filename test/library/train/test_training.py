"""Training on rendered rooms: the attention, the losses, the augmentation and the state."""

from lingbot_map.config import demo_checkpoint
from lingbot_map.geometry import invert, matrix_to_quaternion, unproject
from lingbot_map.streaming.checkpoint import load_model
from lingbot_map.synthetic.rendering import render_clips
from lingbot_map.synthetic.rooms import RoomConfig
from lingbot_map.train import __main__ as train
from lingbot_map.train import attention as flex
from lingbot_map.train import trainer
from lingbot_map.train.attention import dense_attention, visibility
from lingbot_map.train.losses import make_targets, pose_loss
from lingbot_map.train.muon import orthogonalise
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

CPU = torch.device('cpu')
SHORT = RoomConfig(width=84, height=56, num_frames=5, mean_step=(0.1, 0.2))


@pytest.fixture
def plain_updates(monkeypatch):
    """Leave out what takes seconds on a CPU: products of matrices in bfloat16."""
    monkeypatch.setattr('lingbot_map.train.muon.orthogonalise', lambda matrices: matrices)


def new_trainer():
    model = load_model('demo', 'random')
    trainer.initialise(model)
    return trainer.Trainer(model, CPU)


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('setting', [(7, 2, 2, 2, 2), (9, 4, 3, 1, 3), (9, 2, 5, 3, 1)])
def test_block_attention_equals_the_dense_mask(setting):
    model = load_model('demo', 'random')
    blocks = flex.FlexAttention(model, CPU)
    blocks._attend = flex_attention  # the plain function instead of the compiled kernel
    seen = visibility(*setting)
    images = torch.zeros(1, setting[0], 3, 56, 84)
    q, k, v = torch.randn(3, 1, 3, setting[0] * (6 + 24), 64).unbind()
    expected = dense_attention(model, images, seen)(q, k, v)
    torch.testing.assert_close(blocks.bind(images, seen)(q, k, v), expected)


def test_mirrored_clip_is_a_valid_room():
    clip = trainer.mirrored_backwards(render_clips([1_000_003], SHORT, CPU))
    points = unproject(clip.depth[0, 0], clip.K[0, 0])
    T = invert(clip.T_world_cam[0, 1].double()) @ clip.T_world_cam[0, 0].double()
    moved = points.double() @ T[:3, :3].T + T[:3, 3]
    pixels = moved @ clip.K[0, 1].double().T
    u, v = (pixels[..., :2] / pixels[..., 2:]).round().long().unbind(-1)
    # The first column of a mirrored image repeats its neighbour and is left out.
    inside = (moved[..., 2] > 0) & (u > 0) & (u < 84) & (v >= 0) & (v < 56)
    inside[:, 0] = False
    found = clip.depth[0, 1][v[inside], u[inside]]
    error = (found / moved[..., 2][inside] - 1).abs()
    assert inside.float().mean() > 0.5
    assert error.median() < 0.01


def test_perfect_poses_cost_next_to_nothing_and_wrong_ones_much():
    clip = render_clips([1_000_004], SHORT, CPU)
    target = make_targets(clip)
    quaternion = torch.nn.functional.pad(torch.zeros(1, 5, 3), (0, 1), value=1.0)
    wrong = torch.cat((target.t, quaternion, target.fov), -1)
    right = torch.cat((target.t, matrix_to_quaternion(target.R), target.fov), -1)
    assert pose_loss([right], target) < 0.1  # the floor that smooths the norms
    assert pose_loss([wrong], target) > 10 * pose_loss([right], target)


@pytest.mark.slow
def test_loss_falls_when_one_clip_is_repeated():
    torch.manual_seed(0)
    learner = new_trainer()
    clip = render_clips([1_000_001], SHORT, CPU)
    losses = [learner._update(clip, min(1.0, (i + 1) / 10)).sum().item() for i in range(25)]
    assert min(losses[-5:]) < 0.4 * losses[0]


def test_state_and_weights_carry_a_run_over(tmp_path, plain_updates):
    torch.manual_seed(0)
    learner = new_trainer()
    clip = render_clips([1_000_002], SHORT, CPU)
    learner._update(clip, 0.5)
    torch.save(learner.state(), tmp_path / 'state.pt')
    other = new_trainer()
    other.load(torch.load(tmp_path / 'state.pt', weights_only=True))
    for each in (learner, other):
        torch.manual_seed(1)
        each._update(clip, 0.5)
    for a, b in zip(learner.parameters, other.parameters, strict=True):
        torch.testing.assert_close(a, b)
    assert learner.weights().keys() == learner.model.state_dict().keys()


def test_a_broken_gradient_is_no_step(plain_updates):
    learner = new_trainer()
    before = [p.detach().clone() for p in learner.parameters]
    for parameter in learner.parameters:
        parameter.grad = torch.full_like(parameter, float('nan'))
    learner._apply(1.0)
    assert all(torch.isfinite(p).all() for p in learner.parameters)
    drift = max((a - b).abs().max() for a, b in zip(learner.parameters, before, strict=True))
    assert drift < 1e-3  # weight decay alone


def test_orthogonalise_brings_singular_values_near_one():
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(2, 64, 32)))
    assert singular.min() > 0.5
    assert singular.max() < 1.5


def test_clips_of_one_length_replace_the_stages():
    (stage,) = trainer.stages(100)
    assert (stage.until, stage.frames, stage.clips) == (1.0, 100, 7)
    assert trainer.stages(None) == trainer.STAGES


def test_packaged_weights_are_small():
    model = load_model('demo', '')
    assert sum(p.numel() for p in model.parameters()) <= 6_000_000
    assert demo_checkpoint().stat().st_size <= 12_000_000


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--minutes', '0'], '--minutes is 0.0: it must be above 0'),
        (['--slice-minutes', 'nan'], '--slice-minutes is nan'),
        (['--clip-frames', '15'], '--clip-frames is 15: use 16 to 128'),
        (['--clip-frames', '129'], '--clip-frames is 129'),
        (['--out', '/proc/weights'], '/proc/weights'),
        (['--resume', '--out', '{}'], 'state.pt'),
        (['--resume', '--out', '{}/text'], "state.pt' is damaged"),
        (['--resume', '--out', '{}/weights'], "state.pt' is damaged"),
        (['--minutes', 'soon'], "invalid float value: 'soon'"),
    ],
)
def test_wrong_arguments_end_before_the_training(arguments, words, tmp_path, monkeypatch, capsys):
    for name in ('text', 'weights'):
        (tmp_path / name).mkdir()
    (tmp_path / 'text' / 'state.pt').write_text('no state')
    torch.save({'weight': torch.zeros(3)}, tmp_path / 'weights' / 'state.pt')
    arguments = [argument.format(tmp_path) for argument in arguments]
    monkeypatch.setattr('sys.argv', ['train', *arguments])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code
    told = capsys.readouterr().err or str(ended.value)
    assert words in told and told.strip().count('\n') == 0


def test_an_interrupt_is_one_line(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, 'evaluate_rooms', interrupt)
    monkeypatch.setattr('sys.argv', ['train', '--evaluate'])
    with pytest.raises(SystemExit, match='lingbot_map.train: interrupted'):
        train.main()
