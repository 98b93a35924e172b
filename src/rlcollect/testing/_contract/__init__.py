"""The contract of environments, and the checks that hold one against it; what is public is in `rlcollect.testing`."""
