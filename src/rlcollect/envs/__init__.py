"""Drivers: they step N lanes, and write into the memory they are given. They know nothing of policies."""
