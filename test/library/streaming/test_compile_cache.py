"""The folder for compiled code is used, or refused with the reason."""

import os
import subprocess
import sys

from lingbot_map.errors import UserError
from lingbot_map.streaming.compiling import use_compile_cache
import pytest

VARIABLES = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')
COMPILE = """
import torch
from lingbot_map.streaming.compiling import use_compile_cache
use_compile_cache({folder!r})
torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(9))
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr('lingbot_map.streaming.compiling._replaced', {})
    for name in VARIABLES:
        monkeypatch.setenv(name, 'as before')


def test_an_empty_name_changes_nothing():
    use_compile_cache('')
    assert [os.environ[name] for name in VARIABLES] == ['as before'] * 2


def test_the_folder_is_made_and_named_to_both_compilers(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    use_compile_cache('~/a/b')
    folder = tmp_path / 'a' / 'b'
    assert folder.is_dir()
    assert [os.environ[name] for name in VARIABLES] == [str(folder), str(folder / 'triton')]


def test_an_empty_name_takes_back_an_earlier_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLES[1])
    for name in ('a', 'b', '', ''):
        use_compile_cache(name and str(tmp_path / name))
    assert [os.environ.get(name) for name in VARIABLES] == ['as before', None]


def test_torch_writes_there(tmp_path):
    folder = str(tmp_path / 'cache')
    program = [sys.executable, '-c', COMPILE.format(folder=folder)]
    subprocess.run(program, check=True, timeout=300)
    assert any((tmp_path / 'cache').rglob('*.cpp'))


def test_a_file_in_its_place_is_named(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=r"'compile_cache_dir' is '.*file', where nothing"):
        use_compile_cache(str(tmp_path / 'file'))
    assert os.environ[VARIABLES[0]] == 'as before'
