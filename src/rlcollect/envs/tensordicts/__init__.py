"""Environments that take and give TensorDicts: TorchRL's `EnvBase`, and all that is built on it.

They are known by what they can do: TorchRL itself is never imported. `forms` reads what an environment says of itself,
`carrier` keeps one environment and its data from step to step, `driver` steps the lanes, and `loose` is about what has
no fixed form.
"""

from __future__ import annotations

from rlcollect.envs.tensordicts.driver import open_tensordicts
from rlcollect.envs.tensordicts.forms import NEEDS, is_tensordict_env

__all__ = ["NEEDS", "is_tensordict_env", "open_tensordicts"]
