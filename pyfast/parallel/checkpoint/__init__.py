"""Checkpoints that any layout can load: safetensors files and one JSON file, complete or not there at all."""

from pyfast.parallel.checkpoint.io import latest, load, save
from pyfast.parallel.checkpoint.metadata import CheckpointError, CheckpointMetadata, read_metadata
from pyfast.parallel.checkpoint.state import CheckpointState

__all__ = ["CheckpointError", "CheckpointMetadata", "CheckpointState", "latest", "load", "read_metadata", "save"]
