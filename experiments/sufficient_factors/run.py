"""Runs begin in this folder, where gnnpar finds strategy/factors.yaml."""

import os
from pathlib import Path


def prepare(*_: object) -> None:
    os.chdir(Path(__file__).parent)
