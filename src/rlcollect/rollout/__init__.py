"""The only step loop of the package, and what it is made of: policy plans, actors, episode bookkeeping, seeds."""
