"""Idle threads of torch soon sleep in every program: a busy process beside it costs little."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[2]
# lingbot_map_ros.main imports the node late.
SCRIPTS = ('lingbot_map_ros.node', 'lingbot_map_ros.replay.cli', 'lingbot_map.evaluation.cli')
MODULES = [f'lingbot_map.{path.parent.name}' for path in ROOT.glob('lingbot_map/*/__main__.py')]
PROGRAMS = (*SCRIPTS, *(f'{module}.__main__' for module in MODULES), 'lingbot_map.memory_budget')
SHOW_AT_TORCH = """
import importlib, os, sys
class Finder:
    def find_spec(name, *_):
        if name == 'torch':
            print(os.environ.get('GOMP_SPINCOUNT'), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder)
importlib.import_module(sys.argv[1])
"""


def run(code, *arguments, **settings):
    ours = ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(
        [sys.executable, '-c', code, *arguments],
        env=environment | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


@pytest.mark.parametrize('program', PROGRAMS)
def test_every_program_sets_it_before_it_imports_torch(program):
    assert run(SHOW_AT_TORCH, program).stdout == '10000\n'


@pytest.mark.parametrize(
    ('setting', 'spin_count'),
    [({'GOMP_SPINCOUNT': '7'}, '7'), ({'OMP_WAIT_POLICY': 'ACTIVE'}, 'None')],
)
def test_a_setting_of_the_user_is_kept(setting, spin_count):
    told = run(SHOW_AT_TORCH, 'lingbot_map.memory_budget', **setting)
    assert told.stdout == f'{spin_count}\n'


def test_the_openmp_of_torch_takes_it():
    told = run('import lingbot_map, torch', OMP_DISPLAY_ENV='VERBOSE')  # prints what it has read
    assert "GOMP_SPINCOUNT = '10000'" in told.stderr
