"""The sampler lab: samplers side by side over the same prompts, seeds and initial noise."""
