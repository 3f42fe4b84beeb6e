"""YAML of conf/dataset fits its class; real files have the published sizes, where ../shared/data holds them."""

from dataclasses import fields
from typing import get_args

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

from conftest import ROOT
from data.samples import shared
from gnnpar.data import ogb, pyg
from gnnpar.data.rmat import RMAT
from gnnpar.data.synthetic import SBM
from gnnpar.data.typed import TypedSBM
from gnnpar.data.wordnet import WordNet

CONF = ROOT / "conf" / "dataset"
FILES = sorted(CONF.glob("*.yaml"))


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
    assert instantiate(OmegaConf.load(CONF / f"{name}.yaml")) == config


# name, folder, nodes, directed edges without loops, features, classes, task, train/val/test
SIZES = [
    ("cora", "Cora", 2708, 10556, 1433, 7, "single_label", (140, 500, 1000)),
    ("citeseer", "CiteSeer", 3327, 9104, 3703, 6, "single_label", (120, 500, 1000)),
    ("computers", "Computers", 13752, 491722, 767, 10, "single_label", (200, 300, 13252)),
    pytest.param("cs", "CS", 18333, 163788, 6805, 15, "single_label", (300, 450, 17583), marks=pytest.mark.slow),
    ("tolokers", "tolokers", 11758, 1038000, 10, 2, "binary", (5879, 2939, 2940)),
    ("squirrel", "Squirrel", 5201, 396706, 2089, 5, "single_label", (2496, 1664, 1041)),
    ("blogcatalog", "BlogCatalog", 10312, 667966, 10312, 39, "multi_label", (6187, 2062, 2063)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "folder", "nodes", "edges", "features", "classes", "task", "split"), SIZES)
def test_sizes(name, folder, nodes, edges, features, classes, task, split, tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    data = instantiate(OmegaConf.load(CONF / f"{name}.yaml")).load(shared(folder), 0)
    assert (data.num_nodes, data.num_features, data.num_classes, data.task) == (nodes, features, classes, task)
    assert data.num_edges == edges + nodes  # one loop per node
    assert tuple(int(m.sum()) for m in (data.train_mask, data.val_mask, data.test_mask)) == split
    assert torch.equal(torch.bincount(data.edge_index[0], minlength=nodes), data.in_degree)  # undirected
    assert bool((data.in_degree >= 1).all())
    if data.task == "single_label":
        assert torch.bincount(data.y, minlength=classes).min() > 0


def test_public_splits_differ_by_number(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNPAR_CACHE", str(tmp_path))
    yaml = OmegaConf.load(CONF / "tolokers.yaml")
    hashes = {instantiate(yaml, split_index=k).load(shared("tolokers"), 0).split_hash for k in range(10)}
    assert len(hashes) == 10
    with pytest.raises(ValueError, match="has 10 splits"):
        instantiate(yaml, split_index=10).load(shared("tolokers"), 0)
