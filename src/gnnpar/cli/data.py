"""`gnnpar data NAME`: download or build a dataset, and print its numbers."""

from argparse import ArgumentParser

from gnnpar.config.compose import compose
from gnnpar.settings import config_errors
from gnnpar.track.console import say


def run(argv: list[str]) -> int:
    parser = ArgumentParser("gnnpar data", description="Download or build a dataset, and print its numbers.")
    parser.add_argument("name", help="as in dataset=NAME")
    parser.add_argument("overrides", nargs="*", metavar="dataset.KEY=VALUE")
    options = parser.parse_args(argv)
    with config_errors():
        data = compose([f"dataset={options.name}", *options.overrides]).load_dataset()
    train, val, test = (int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask))
    say(f"{data.name}: {data.num_nodes} nodes, {data.num_edges} edges, {data.num_classes} classes")
    say(f"{data.num_features} features; {train} training, {val} validation, {test} test nodes")
    return 0
