"""Folders that users name are made, tried and refused with the reason."""

import os

from lingbot_map.cli import writable_folder
import pytest


def test_a_folder_is_made_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert writable_folder('~/a/b') == tmp_path / 'a' / 'b'
    monkeypatch.chdir(tmp_path)
    assert writable_folder('a/b') == tmp_path / 'a' / 'b'
    assert list((tmp_path / 'a' / 'b').iterdir()) == []


def test_the_home_of_an_unknown_user_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match='there is no such user') as error:
        writable_folder('~no-such-user/a')
    assert error.value.strerror == 'there is no such user'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('name', ['file', 'file/below', '/proc', '/dev/null'])
def test_where_nothing_can_be_written_is_found_out_even_for_root(name, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError):
        writable_folder(os.path.join(tmp_path, name))
