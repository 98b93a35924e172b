"""Environments that step N lanes by one call: Gymnasium's vector environments, EnvPool, simulators on tensors."""
