"""Runs every setting of the golden data in `golden/`; its README says what they are."""

from pathlib import Path

from check_golden import list_settings
from golden_folder import GoldenFolder, Setting
import pytest

GOLDEN = GoldenFolder(Path(__file__).parents[2] / 'golden')


def as_test(setting: Setting):
    marks = []
    if setting.part == 'full_size':
        marks.append(pytest.mark.slow)
    return pytest.param(setting, id=f'{setting.part}-{setting.name}', marks=marks)


@pytest.mark.parametrize('setting', map(as_test, list_settings(GOLDEN, full_size=True)))
def test_meets_golden(setting):
    deviations = setting.run()
    report = '\n'.join(map(str, deviations))
    assert any(deviation.past for deviation in deviations) == setting.shows_defect, report
