"""Workers on a Ray cluster: starts them, asks them, notices deaths, ends them. Knows nothing of RL.

It is the only room that knows Ray, and is entered when a collector or buffer on a cluster is made, never before:
`import rlcollect` does not import Ray.
"""
