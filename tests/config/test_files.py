"""A file is whole or not there, and what went wrong is one line."""

import errno
import json
import os
from pathlib import Path

import pytest

from gnnpar.files import WriteError, open_atomic, write_json_atomic, write_text_atomic
from gnnpar.paths import own_cache, path_of


def test_write_of_an_existing_file_replaces_it(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    write_text_atomic(file, "new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("sync", [False, True])
def test_written_json_is_read_back(tmp_path, sync):
    write_json_atomic(tmp_path / "a.json", {"a": [1, 2]}, sync=sync)
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, 2]}


def test_error_while_writing_keeps_the_old_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), open_atomic(file) as out:
        out.write(b"half" * (1 // 0))
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_value_without_json_form_keeps_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(TypeError):
        write_json_atomic(file, {"a": object()})
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_full_disk_is_one_line_with_the_file(tmp_path):
    file = tmp_path / "a.txt"
    with pytest.raises(WriteError) as raised, open_atomic(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(raised.value) == f"{file} cannot be written: No space left on device"
    assert raised.value.errno == errno.ENOSPC and not os.listdir(tmp_path)


def test_missing_folder_is_one_line_with_the_file(tmp_path):
    with pytest.raises(OSError, match=r"b/a\.txt cannot be written: No such file or directory"):
        write_text_atomic(tmp_path / "b" / "a.txt", "")


def test_tilde_of_a_path_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/mine")
    assert path_of("~/runs", "folder") == Path("/home/mine/runs")
    with pytest.raises(ValueError, match=r"folder=~nobodyx/runs: there is no such user; write the folder out$"):
        path_of("~nobodyx/runs", "folder")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without HOME and passwd entry
    with pytest.raises(ValueError, match="folder=~/runs: this user has no home folder; set HOME, or write the folder"):
        path_of("~/runs", "folder")


def test_relative_cache_of_the_user_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_cache() == tmp_path / ".cache" / "gnnpar"
