"""The benchmark prints what it measured, and says what is wrong with an argument."""

from lingbot_map.benchmark import main
import pytest

SMALL = ['--model', 'tiny', '--image-width', '84', '--image-height', '56', '--frames', '6',
         '--num-scale-frames', '2', '--sliding-window', '2', '--device', 'cpu']  # fmt: skip


@pytest.mark.parametrize('weights', ['random', 'recipe'])
def test_prints_the_figures(capsys, weights):
    assert main([*SMALL, '--weights', weights]) == 0
    out = capsys.readouterr().out
    assert f'tiny model, {weights} weights, 84x56' in out
    for name in ('scale batch of 2', 'frame p50', 'frame p99', 'last fifth'):
        assert name in out


@pytest.mark.parametrize(('arguments', 'part'), [
    (['--weights', '/nowhere.pt'], "'/nowhere.pt' is not a file"),
    (['--image-width', '85'], 'multiple of the patch size'),
    (['--device', 'cuda:77'], 'CUDA'),
    (['--device', 'abacus'], 'abacus')])  # fmt: skip
def test_wrong_arguments_are_one_line(capsys, arguments, part):
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert 'Traceback' not in error
