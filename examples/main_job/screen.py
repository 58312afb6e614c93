"""Where frames go: a live panel in a terminal, a line a step elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live

from examples.main_job.display import View, plain, render


class Screen:
    """Shows frames between ``with`` and its end; the live panel is gone afterwards.

    Args:
        console: where to write.
        live: False writes lines even to a terminal.
    """

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=1, transient=True) if live else None
        self._phase = ""
        self._printed = 0

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: View) -> None:
        """Show one frame."""
        if self._live is not None:
            self._live.update(render(view, width=self._console.width, height=self._console.height))
            return
        done = [step for step in view.steps if step.update_s is not None]
        for step in done[self._printed :]:
            self._console.print(plain(step), highlight=False, soft_wrap=True)
        self._printed = len(done)
        if not done and view.phase != self._phase:
            self._phase = view.phase
            self._console.print(f"{view.phase} …", highlight=False, soft_wrap=True)
