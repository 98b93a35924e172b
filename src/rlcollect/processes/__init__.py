"""Processes: how they are started, watched and ended, and the memory they share. Knows nothing of what they do."""
