"""Environments with several agents, by PettingZoo's Parallel and AEC APIs.

They are known by what they can do. PettingZoo itself is imported only to convert an environment of the AEC API.
`games` is about single environments, `groups` about which tensors their agents have, `actions` about what agents are
given to do, `infos` about what comes in their infos, `casts` about who is there, and `driver` steps the lanes.
"""

from __future__ import annotations

from rlcollect.envs.pettingzoo.driver import open_pettingzoo
from rlcollect.envs.pettingzoo.games import is_pettingzoo

__all__ = ["is_pettingzoo", "open_pettingzoo"]
