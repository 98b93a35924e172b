"""What the server of processes imports, so that those it forks need not: seconds, once.

Ctrl-C is for the program, which ends the others; here, and in all that come from here, it is not seen.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)

import gymnasium  # noqa: E402, F401
import tensordict.nn  # noqa: E402, F401
import torch  # noqa: E402, F401
