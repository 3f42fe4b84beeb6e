"""The script that measures how long until a command shows something."""

import pytest

import startup


def test_startup_of_a_failing_command_raises(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main(["--runs", "1", "--only", "`gnnpar --help`"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| `gnnpar --help` | 0.1 | 0.") and row.count("|") == 5
    with pytest.raises(RuntimeError, match="gnnpar nonsense: exit code 2"):
        startup.cpu_seconds(("nonsense",), None, startup.ROOT)
