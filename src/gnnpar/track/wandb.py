"""wandb: a mirror of a run for dashboards, one run a job, opened by rank 0 when its plan is known.

The history is metrics.jsonl under the same names (`flat`), and the curves once more against training seconds and
gigabytes sent; config is the resolved settings, the plan and the commit; tables hold the partition and the breakdown;
result.json and plan.json are artifacts, and so are trace.json and schedule.svg where they are. metrics.jsonl stays the
record: whatever goes wrong here is one line on stderr, and training goes on. wandb is imported when a run is opened,
by the rank that opens it.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import annotated_types as at

from gnnpar.deadline import within
from gnnpar.durable import JsonDict, JsonObject, is_open_to_others, refuse_others, require_file, write_json_whole
from gnnpar.printable import counted
from gnnpar.scratch import lasting_socket_folder
from gnnpar.track import keys
from gnnpar.track.console import Console, complain, say
from gnnpar.track.tracker import Tee, Tracker

Run = Any  # wandb.Run, or None: the package is imported when a run is opened
LINK = "wandb.json"  # in the run folder: where the run is on wandb
CURVES = ("loss/train", "metric/train", "metric/val", "metric/test")
GIGABYTES = "comm/total_gigabytes_so_far"
AXES = {"against_seconds": "time/train_seconds", "against_gigabytes": GIGABYTES}
RESULTS = (
    "epochs_done",
    "loss",
    "metric",
    "epoch_seconds",
    "train_wall_seconds",
    "cold_start_seconds",
    "breakdown_seconds",
    "bytes_per_epoch",
    "cpu_seconds",
    "memory_bytes",
    "time_to_target",
    "fidelity",
)
FACTS = (
    "commit",
    "code",
    "hardware",
    "versions",
    "world_size",
    "threads_per_rank",
    "cores",
    "oversubscribed",
    "transport",
    "device",
    "provenance",
    "exactness",
    "config_hash",
)


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """tracker=wandb. The terminal shows what tracker=console shows.

    mode: online; offline, for `wandb sync` later; disabled, the terminal alone. group: null, the sweep of the job.
    connect_seconds: how long the start waits for the server before the run is kept offline; upload_seconds: the end.
    """

    mode: Literal["online", "offline", "disabled"] = "online"
    project: str = "gnnpar"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    every: Annotated[int, at.Ge(1)] = 10
    connect_seconds: Annotated[float, at.Gt(0)] = 5.0
    upload_seconds: Annotated[float, at.Gt(0)] = 30.0

    def build(self, run_dir: Path, epochs: int, job: JsonObject) -> Tracker:
        console = Console(every=self.every).build(run_dir, epochs, job)
        return console if self.mode == "disabled" else Tee(trackers=(console, Mirror(self, run_dir, job)))


class Mirror:
    """One wandb run; without one, from the start or from an error on, it is silent."""

    def __init__(self, config: Wandb, run_dir: Path, job: JsonObject) -> None:
        self.config, self.run_dir, self.job = config, run_dir, job
        self._run: Run = None

    def start(self, facts: JsonObject) -> None:
        self._run = open_run(self.config, self.run_dir, self.job)
        self._attempt(lambda run: link(run, self.run_dir))
        local = self._run is not None and self._run.offline  # then nothing but this machine can be slow
        seconds = self.config.upload_seconds if local else self.config.connect_seconds
        self._attempt(lambda run: describe(run, self.run_dir, facts), seconds)

    def log(self, row: JsonObject) -> None:
        self._attempt(lambda run: run.log(flat(row) | against(row), step=row["epoch"], commit=True))

    def close(self, result: JsonObject | None = None) -> None:
        path, online = sync_path(self._run), self._run is not None and not self._run.offline
        done = self._attempt(lambda run: conclude(run, self.run_dir, result), self.config.upload_seconds)
        if done and not online:
            say(f"wandb: kept offline; upload with: wandb sync {shlex.quote(str(path))}")
        self._run = None

    def _attempt(self, act: Callable[[Run], object], seconds: float | None = None) -> bool:
        """Whether it was done, within the seconds if given; the first error ends the mirror with one line."""
        run = self._run
        if run is None:
            return False
        try:
            within(seconds, lambda: act(run), name="wandb") if seconds else act(run)  # tables wait for the server
        except Exception as error:
            self._run = None
            complain(
                f"wandb stopped ({reason(error)}); metrics.jsonl has everything; "
                f"upload what wandb has with: wandb sync {shlex.quote(str(sync_path(run)))}"
            )
            return False
        return True


_START_SECONDS = 60.0  # of the import and of the process that wandb starts beside the run


def open_run(config: Wandb, run_dir: Path, job: JsonObject) -> Run:
    """A run on the server, or on disk where it cannot be reached; None, with a line, where there can be neither."""
    try:
        wandb = within(_START_SECONDS, lambda: load(entity=config.entity), name="wandb")  # its core may die
    except Exception as error:
        complain(f"wandb cannot be used ({reason(error)}); metrics.jsonl has everything")
        return None
    arguments = identity(config, job) | {"config": settings_of(job, run_dir)}
    with _nothing_read_here():
        return _opened(wandb, config, run_dir, arguments)


def _opened(wandb: ModuleType, config: Wandb, run_dir: Path, arguments: JsonObject) -> Run:
    if config.mode == "online":
        attempt = uuid.uuid4().hex[:8]
        try:
            login = partial(wandb.login, prompt=False, verify=False)  # a prompt would stop training
            if not within(_START_SECONDS, login, name="wandb"):
                raise ValueError("no API key; set WANDB_API_KEY or call wandb login")
            return begin(wandb, config, run_dir, "online", attempt, arguments)
        except Exception as error:
            with suppress(Exception):  # ends what would keep trying beside the training
                within(_START_SECONDS, wandb.teardown, name="wandb")
            for leftover in (run_dir / "wandb").glob(f"run-*-{attempt}"):
                shutil.rmtree(leftover, ignore_errors=True)
            complain(f"wandb cannot be reached ({reason(error)}); this run is kept offline")
    try:
        return begin(wandb, config, run_dir, "offline", uuid.uuid4().hex[:8], arguments)
    except Exception as error:
        complain(f"wandb cannot be used ({reason(error)}); metrics.jsonl has everything")
        return None


def load(*, entity: str | None) -> ModuleType:
    """The package, set to be silent. `entity`: whose runs these are, where tracker.entity says.

    Its own error reporting goes to the same server and holds up the exit of the process: 20 s where the server does not
    answer. WANDB_ERROR_REPORTING=true brings it back.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_DISABLE_GIT", "true")  # wandb.setup runs git before it reads disable_git
    refuse_settings_of(Path.cwd(), entity=entity)
    try:
        Path.home()
    except RuntimeError as error:
        raise ValueError("wandb reads settings in your home, and you have none: set HOME") from error
    _forget_service_of_others()
    import wandb
    from wandb.sdk.data_types._private import MEDIA_TMP

    if wandb.run is not None:
        raise ValueError("this program has a run of its own open in wandb: finish it before")
    if os.path.dirname(MEDIA_TMP.name) != tempfile.gettempdir() or not os.path.isdir(MEDIA_TMP.name):  # of a run before
        MEDIA_TMP.name = tempfile.mkdtemp()
        wandb.teardown()  # its own process has them, too
    with _nothing_read_here():
        _serve(wandb)
    return wandb


@contextmanager
def _nothing_read_here() -> Iterator[None]:
    """Inside, wandb reads no settings of the working directory, and writes none there, as its login does; nor does it
    read keys of a run: others may have made those files since `refuse_settings_of` looked."""
    from wandb import Settings
    from wandb.sdk.wandb_config import Config

    nowhere = property(lambda _: os.path.join(os.devnull, "settings"))
    with _exchanged(Settings, "settings_workspace", nowhere), _exchanged(Config, "_load_defaults", lambda _: None):
        yield


@contextmanager
def _exchanged(owner: type, name: str, value: object) -> Iterator[None]:
    """Inside, a class has another member."""
    before: object = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _serve(wandb: ModuleType) -> None:
    """Wandb's process beside this one, where it is not there. ValueError where it can make no socket: it then listens
    at a port, for who can fill the file system of its folder; there is no password, and it writes files and sends the
    API key."""
    before = os.environ.get("TMPDIR")
    if os.getpid() not in _SOCKETS:
        _SOCKETS[os.getpid()] = lasting_socket_folder()
    place = _SOCKETS[os.getpid()] or Path(tempfile.gettempdir())
    if len(str(place)) > _LONGEST:
        refuse_others(Path("/tmp"))  # noqa: S108  # wandb puts its socket there, where the name is too long
    try:
        os.environ["TMPDIR"] = str(place)
        wandb.setup(settings=wandb.Settings(silent=True, disable_git=True))
    finally:
        os.environ.pop("TMPDIR")
        os.environ |= {} if before is None else {"TMPDIR": before}
    if "-tcp-" in os.environ.get("WANDB_SERVICE", ""):
        wandb.teardown()
        raise ValueError("it has no folder for its socket, and listens at a port for all users; set TMPDIR")


_LONGEST = 107 - len("/wandb-4194304-4194304-4294967295/socket")
_SOCKETS: dict[int, Path | None] = {}
"""Process -> the folder for the socket that it has made."""


def _forget_service_of_others() -> None:
    """wandb leaves in the environment where its process listens. That may have ended since, and its folder, whose name
    everybody could read, may have been made anew by another user: he would be sent the key."""
    socket = os.environ.get("WANDB_SERVICE", "").partition("-unix-")[2]
    try:
        refuse_others(Path(socket or "/"))
        known = bool(socket)
    except OSError:
        known = False
    if not known:
        os.environ.pop("WANDB_SERVICE", None)


_HARMLESS = {"project", "mode", "disabled"}
_PUBLIC = "https://api.wandb.ai"
_DEFAULTS = "config-defaults.yaml"


def refuse_settings_of(folder: Path, *, entity: str | None) -> None:
    """ValueError where wandb, which reads its settings of the working directory unasked, would find more there than
    a project: a server that is named there, or a proxy, gets the user's key, and the account of an `entity` the runs,
    unless tracker.entity or WANDB_ENTITY says whose they are. Or keys of the run's own. WriteError where other users
    can change the settings in his home."""
    if os.path.lexists(folder / _DEFAULTS):
        raise ValueError(f"{folder / _DEFAULTS} would give every run keys that it was not asked for; rename it")
    own = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    for file in (f"{own}/settings", "~/.netrc", "~/_netrc"):
        if os.path.lexists(place := os.path.expanduser(file)):
            refuse_others(Path(place))
    in_sagemaker = "SM_TRAINING_ENV" in os.environ or Path("/opt/ml/input/config/hyperparameters.json").exists()
    if in_sagemaker and os.path.lexists(folder / "secrets.env"):
        raise ValueError(f"{folder / 'secrets.env'} would decide who gets your key; set its variables instead")
    for file in (folder / "wandb" / "settings", folder / ".wandb" / "settings"):
        if not os.path.lexists(file):
            continue
        require_file(file)
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(file, encoding="ascii")
            named = dict(parser.items("default"))
        except UnicodeDecodeError as error:  # which wandb reads by the locale
            raise ValueError(f"{file} holds characters that are not ASCII, and decides who gets your key") from error
        except configparser.Error:  # wandb reads nothing of it
            continue
        if named.get("base_url", "").rstrip("/") in ("", _PUBLIC) or "WANDB_BASE_URL" in os.environ:
            named.pop("base_url", None)
        if entity or "WANDB_ENTITY" in os.environ:
            named.pop("entity", None)
        if more := sorted(named.keys() - _HARMLESS):
            raise ValueError(
                f"{file} sets {more[0]}, and decides who gets your {'runs' if more[0] == 'entity' else 'key'}; put it "
                f"into ~/.config/wandb/settings, or set WANDB_{more[0].upper()}, and take it out there"
            )


def begin(wandb: ModuleType, config: Wandb, run_dir: Path, mode: str, run_id: str, arguments: JsonObject) -> Run:
    """Within a time: the process that wandb starts may die, and wandb would wait for that for ever."""
    return within(
        config.connect_seconds + _START_SECONDS,
        lambda: _begin(wandb, config, run_dir, mode, run_id, arguments),
        name="wandb",
    )


def _begin(wandb: ModuleType, config: Wandb, run_dir: Path, mode: str, run_id: str, arguments: JsonObject) -> Run:
    """wandb.init without what disturbs a measurement: no console capture, no sampling of the system, no code. Nor git,
    which runs programs that the settings of a checkout name: the working directory may be somebody else's. Nor what
    lies in its folder under names that it writes to, as wandb-resume.json with WANDB_RESUME=auto."""
    if is_open_to_others(run_dir):
        raise ValueError(f"others may add files to {run_dir}, by which it is led elsewhere: name another folder")
    _drop_links(run_dir)
    _serve(wandb)
    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        save_code=False,
        disable_git=True,
        init_timeout=config.connect_seconds,
        finish_timeout=config.upload_seconds / 2,
        finish_timeout_raises=True,
    )
    return wandb.init(
        dir=str(run_dir),
        mode=mode,
        id=run_id,
        reinit="create_new",
        settings=settings,
        project=config.project,
        entity=config.entity,
        **arguments,
    )


def _drop_links(run_dir: Path) -> None:
    """Of wandb's folder in that of a run, and second names of files, which another may have put there; it makes its own
    links anew."""
    for name in ("wandb", ".wandb"):
        with suppress(FileNotFoundError):
            for entry in list(os.scandir(run_dir / name)):
                if entry.is_symlink() or (entry.is_file() and os.lstat(entry).st_nlink > 1):
                    os.unlink(entry)


def identity(config: Wandb, job: JsonObject) -> JsonDict:
    """What a run is found by: study, strategy, name and tags."""
    ranks, seed = job["world_size"], job["seed"]
    tags = (
        job["strategy"],
        job["model"],
        job["dataset"],
        counted(ranks, "rank"),
        job["provenance"],
        *job["exactness"],
    )
    return {
        "group": config.group or job["study"] or None,
        "job_type": job["strategy"],
        "name": config.name
        or f"{job['strategy']} {job['model']} {job['dataset']} {counted(ranks, 'rank')} seed {seed}",
        "tags": [tag[:64] for tag in dict.fromkeys((*tags, *config.tags))],
    }


def settings_of(job: JsonObject, run_dir: Path) -> JsonDict:
    """config: the resolved settings with the names of the groups, what ran them, and the plan without its arrays."""
    settings: JsonDict = dict(job["resolved"])
    for group, name in job["names"].items():
        if isinstance(settings.get(group), Mapping):
            settings[group] = {"name": name, **settings[group]}
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    run = {name: job[name] for name in FACTS} | {"study": job["study"]}
    return settings | {"run": run, "plan": {name: value for name, value in plan.items() if name != "arrays"}}


def link(run: Run, run_dir: Path) -> None:
    """What finds the run again: read by gnnpar dashboard."""
    place = {"id": run.id, "entity": run.entity or None, "project": run.project, "group": run.group or None}
    place |= {"mode": "offline" if run.offline else "online", "path": os.path.relpath(run.settings.sync_dir, run_dir)}
    write_json_whole(run_dir / LINK, place)


def describe(run: Run, run_dir: Path, facts: JsonObject) -> None:
    """Before the first epoch: axes, the table of units, the table of parts, the plan."""
    import wandb

    run.define_metric("epoch")
    for name in keys.KEYS:
        run.define_metric(name, step_metric="epoch")
    run.define_metric(GIGABYTES, step_metric="epoch")
    for prefix, axis in AXES.items():
        for curve in CURVES:
            run.define_metric(f"{prefix}/{curve}", step_metric=axis)
    units: list[list[str]] = [[name, key.unit, key.meaning] for name, key in keys.KEYS.items()]
    units.append([GIGABYTES, "GB", "comm/total_bytes_so_far in units of 1e9 bytes"])
    tables = {"tables/units": wandb.Table(columns=["metric", "unit", "meaning"], data=[*units])}
    if parts := facts.get("parts"):
        tables["tables/partition"] = wandb.Table(columns=list(parts[0]), data=[list(part.values()) for part in parts])
    run.log(tables, step=0, commit=False)  # goes out with epoch 0
    add_artifact(run, "plan", run_dir / "plan.json")


def conclude(run: Run, run_dir: Path, result: JsonObject | None) -> None:
    """After the last epoch: summary, breakdowns, result.json, and the end of the run."""
    if result is not None:
        sum_up(run, run_dir, result)
    run.finish(exit_code=0 if result is not None and result["status"] == "completed" else 1)


def sum_up(run: Run, run_dir: Path, result: JsonObject) -> None:
    run.summary.update({"status": result["status"], "error": result["error"]})
    run.summary.update({"result": {name: result[name] for name in RESULTS}})
    if result["epochs_done"]:
        seconds = {name: value for name, value in result["breakdown_seconds"].items() if name != "comm_total"}
        sent = {k: v for k, v in result["bytes_per_epoch"].items() if k not in ("total", "metadata")}
        charts = {"charts/seconds_per_epoch": bars("seconds", seconds), "charts/bytes_per_epoch": bars("bytes", sent)}
        run.log(charts)
    add_artifact(run, "result", run_dir / "result.json")
    for kind, name in (("trace", "trace.json"), ("schedule", "schedule.svg")):  # of trace=true
        if (run_dir / name).exists():
            add_artifact(run, kind, run_dir / name)


def bars(unit: str, values: Mapping[str, float]) -> object:
    """A bar a phase."""
    import wandb

    table = wandb.Table(columns=["phase", unit], data=[[name, value] for name, value in values.items()])
    return wandb.plot.bar(table, "phase", unit, title=f"{unit} per epoch by phase")


def add_artifact(run: Run, kind: str, file: Path) -> None:
    import wandb

    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    artifact.add_file(str(file))
    run.log_artifact(artifact)


def flat(row: JsonObject) -> JsonDict:
    """A row as metrics of one number each: lists are by rank, mappings by what they name, [cosine, error] by layer."""
    metrics: JsonDict = {}
    for name, value in row.items():
        if name == "fidelity/layers":
            for layer, (cosine, error) in value.items():
                prefix = f"{name}/{layer.replace('.', '_')}"  # wandb reads a dot as a step into a mapping
                metrics |= {f"{prefix}/cosine": cosine, f"{prefix}/relative_error": error}
        elif isinstance(value, Mapping):
            metrics |= flat({f"{name}/{part}": number for part, number in value.items()})
        elif isinstance(value, (list, tuple)):
            metrics |= {f"{name}/rank_{rank}": number for rank, number in enumerate(value)}
        else:
            metrics[name] = value
    return metrics


def against(row: JsonObject) -> JsonDict:
    """The curves of a row under the names that are drawn against seconds and gigabytes, and the gigabytes."""
    curves = {f"{prefix}/{curve}": row[curve] for prefix in AXES for curve in CURVES if curve in row}
    sent = row.get("comm/total_bytes_so_far")
    return curves | ({} if sent is None else {GIGABYTES: sent / 1e9})


def sync_path(run: Run) -> str:
    """Where the run is kept, as one would type it."""
    folder = Path(run.settings.sync_dir) if run is not None else Path()
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def reason(error: BaseException) -> str:
    """The first line of an error, or its name."""
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
