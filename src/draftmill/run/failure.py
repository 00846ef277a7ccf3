"""The end of a run that cannot go on. What was saved stays valid."""


class RunFailed(ValueError):
    """Says what happened, to whom, and where to look: the message is for the user."""
