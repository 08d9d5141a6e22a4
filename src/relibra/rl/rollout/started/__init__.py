"""The rollout server that a run starts itself. In: `RunConfig`, a folder of weights. Out: an address."""
