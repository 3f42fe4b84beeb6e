"""Datasets: one in-memory value after preprocessing, configurations that load it, and the tasks trained on it."""

from gnnpar.data.dataset import Dataset, TaskName
from gnnpar.data.preprocess import DatasetConfig, Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.data.tasks import Task, make_task

__all__ = ["Dataset", "DatasetConfig", "Preprocess", "RawGraph", "Task", "TaskName", "make_task", "prepare"]
