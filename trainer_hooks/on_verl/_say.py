"""What the hook says once at start, in the process of the trainer."""

import sys


def say(text: str) -> None:
    """Print one line where verl prints its own, whatever the process makes of log levels.

    A library leaves levels and handlers of loggers to the program; warnings go through :mod:`logging`.
    """
    print(f"equipoise: {text}", file=sys.stderr, flush=True)  # noqa: T201 - see above
