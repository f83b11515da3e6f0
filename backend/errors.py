"""The base of every error that a user can cause and mend."""


class MixGRPOError(ValueError):
    """A refusal in one sentence: the cause, the value, and the way out."""
