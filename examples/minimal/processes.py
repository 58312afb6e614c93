"""What a rank does about the process that started it, and about the noise of libraries."""

from __future__ import annotations

import logging
import os
import threading
import time

_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """End this process, hard, soon after the one that started it has: torchrun itself may be killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def quiet() -> None:
    """No progress bars of transformers, and not torch's remark on tracing at the first jagged tensor."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
