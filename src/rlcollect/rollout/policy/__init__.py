"""What the user passed as a policy, and how it is called: read, probed, planned, and shown its own past."""
