"""The options of a collector: each declared, documented and checked in this room, and nowhere else.

Four frozen value objects carry them through the house: `What` to collect, `Where` the frames are made, `How` actions
are chosen, and the `Sink` that takes the batches. What only some kinds have is in `Workers`, `Processes` (of this
machine), `Remotes` (of a cluster), `Stacking` (batches of several workers) and `Staleness`. A collector's flat
constructor is made from their fields (`collectors.opened`). To add an option: a field here, its use in the room that
needs it, a test.

This room knows `devices` and `errors`, and no other of the house; it checks values, not environments.
"""

from rlcollect.options.how import ExplorationType, How, exploration_type, set_exploration_type
from rlcollect.options.parse import option_fields, parse_options
from rlcollect.options.remotes import Remotes
from rlcollect.options.sink import Sink
from rlcollect.options.sync import Sync
from rlcollect.options.what import What
from rlcollect.options.where import Where
from rlcollect.options.workers import Processes, Stacking, Staleness, Workers

__all__ = [
    "ExplorationType",
    "How",
    "Processes",
    "Remotes",
    "Sink",
    "Stacking",
    "Staleness",
    "Sync",
    "What",
    "Where",
    "Workers",
    "exploration_type",
    "option_fields",
    "parse_options",
    "set_exploration_type",
]
