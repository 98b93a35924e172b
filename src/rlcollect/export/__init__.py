"""What leaves the process: datasets on disk."""

from __future__ import annotations

from rlcollect.export.dataset import DatasetWriter, load_dataset

__all__ = ["DatasetWriter", "load_dataset"]
