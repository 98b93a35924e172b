"""Collection in the process of the caller."""

from __future__ import annotations

from rlcollect.collectors.base import BaseCollector

__all__ = ["Collector"]


class Collector(BaseCollector):
    """Runs a policy in environments, in this process, and delivers TensorDicts.

    A torch `IterableDataset` and a context manager::

        with Collector("CartPole-v1", policy, frames_per_batch=2048, total_frames=1_000_000, num_envs=16) as collector:
            for batch in collector:  # TensorDict, batch_size [16, 128]
                train(batch)
                collector.update_policy_weights_()

    Construction makes and resets the environments, and calls the policy once on the first observation to learn what it
    writes; random states and module buffers are put back after that (a counter that the policy keeps is not). The
    policy is called under `torch.no_grad()`, with a random stream of the collector's own; whether it is in train or
    eval mode is the caller's choice, and left alone.

    Args:
        create_env_fn: an environment id, a callable that makes an environment, an instance of one, or a sequence of
            these, one lane each. Environments are those of Gymnasium, its vector environments, EnvPool's, vector
            environments on tensors, TorchRL's and PettingZoo's; those that hold several lanes come one at a time.
            Instances stay their owner's to close, and are for one collector at a time.
        policy: from observation to action, as a callable or module: one positional parameter gets the observation (a
            TensorDict of its keys for a Dict space), several named ones the keys of those names. Or from TensorDict to
            TensorDict: `TensorDictModule`, `TensorDictSequential`, or a callable whose parameter is annotated as a
            TensorDict or named `tensordict` or `td`. None or `RandomPolicy()`: random actions, among those that an
            "action_mask" allows where the observation has one (or the info, if `info_keys` names it).
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        OptionError, SpaceError, PolicyError, EnvError: see `rlcollect.errors`.
        What an environment raises, from a `WorkerError`.
    """
