"""`gnnpar export RUN`: write the trained model as files that do not need gnnpar."""

from __future__ import annotations

import os
from pathlib import Path

from gnnpar.cli.predict import parser_of_run, run_folder
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import complain, say


def run(argv: list[str]) -> int:
    """Return 0 if all is written, 1 if the model has no program (weights are written), 2 without a checkpoint."""
    parser = parser_of_run("export", "Write a trained model as files that do not need gnnpar.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (export/ of the run)")
    parser.add_argument("--onnx", action="store_true", help="an ONNX file, too (needs the extra [onnx])")
    options = parser.parse_args(argv)
    from gnnpar.training.result.export import export, missing
    from gnnpar.training.result.trained import find, opened

    if options.onnx and (package := missing()):
        raise ConfigError(
            f"--onnx needs {package}, which is not installed: pip install 'gnnpar[onnx]', or leave it out"
        )
    with config_errors():
        found, settings = find(options.run, options.which)
        trained = opened(found, settings)
    folder = options.out or run_folder(options.run, found.folder) / "export"
    problems = export(trained, folder, onnx=options.onnx)
    for line in problems:
        complain(line)
    files = ", ".join(sorted(p.name for p in folder.iterdir()))
    say(f"epoch {trained.epoch}: {files}  ->  {os.path.relpath(folder)}")
    return 1 if problems else 0
