"""The mathematics, once, for the sampler and for the trainer; see README.md in this folder."""
