"""The trainer: rollout, score, advantages, update; see README.md in this folder."""
