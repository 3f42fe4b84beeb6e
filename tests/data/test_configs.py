"""Every conf/dataset/*.yaml lists exactly the fields of its class, under the name of its file."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

from gnnpar.data import ogb, pyg
from gnnpar.data.rmat import RMAT
from gnnpar.data.synthetic import SBM
from gnnpar.data.typed import TypedSBM
from gnnpar.data.wordnet import WordNet

FILES = sorted((Path(__file__).resolve().parents[2] / "conf" / "dataset").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_yaml_lists_the_fields_of_its_class(file):
    yaml = OmegaConf.load(file)
    assert isinstance(yaml, DictConfig)
    cls = get_class(yaml["_target_"])
    assert set(yaml) == {"_target_", *(field.name for field in fields(cls))}
    config = instantiate(yaml)
    assert config.name == file.stem
    plain = {key: value for key, value in yaml.items() if key != "_target_"}
    assert TypeAdapter(cls).validate_python(plain, strict=False) == config


def test_every_known_dataset_has_a_yaml():
    names = get_args(ogb.OGBDataset.__annotations__["name"])
    assert all(ogb._SOURCES[name].files for name in names)
    drawn = ("sbm", "sbm_reddit", "sbm_products", "sbm_verdict")
    assert {file.stem for file in FILES} >= {*pyg._SOURCES, *names, *drawn, "npz"}


@pytest.mark.parametrize(
    ("name", "config"), [("sbm", SBM()), ("rmat", RMAT()), ("sbm_typed", TypedSBM()), ("wordnet", WordNet())]
)
def test_yaml_and_class_agree_on_the_default(name, config):
    assert instantiate(OmegaConf.load(FILES[0].with_name(f"{name}.yaml"))) == config
