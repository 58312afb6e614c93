"""Messages that the hook prints once at startup, in the trainer's process."""

import sys


def say(text: str) -> None:
    """Print one line where verl prints its own, regardless of the process's log levels.

    A library leaves logger levels and handlers to the program; warnings go through :mod:`logging`.
    """
    print(f"equipoise: {text}", file=sys.stderr, flush=True)  # noqa: T201 - see above
