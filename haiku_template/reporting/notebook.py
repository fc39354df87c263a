"""Output of a run in a notebook: a line that changes in place, and the report."""

from collections.abc import Callable
from pathlib import Path


def line() -> Callable[[str], None]:
    """Makes a function that shows a text, in place of the one before."""
    from IPython.display import display

    handles = []

    def show(text: str) -> None:
        if handles:
            handles[0].update({"text/plain": text}, raw=True)
        else:
            handles.append(display({"text/plain": text}, raw=True, display_id=True))

    return show


def show_picture(path: Path) -> None:
    """Shows a PNG below what was printed."""
    from IPython.display import Image, display

    display(Image(filename=path))
