"""Output of a run in a notebook: a line that changes in place, tables, the report."""

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 100  # Columns of a table as text, for who shows no HTML.


def means(put: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Makes the functions that show a line in place, and a text or a table below."""

    from IPython.display import display

    handles = []

    def show_line(text: str) -> None:
        if handles:
            handles[0].update({"text/plain": text}, raw=True)
        else:
            handles.append(display({"text/plain": text}, raw=True, display_id=True))

    def show(value: Any) -> None:
        show_table(value) if isinstance(value, Table) else put(value)

    return show_line, show


def show_table(table: Table) -> None:
    """Shows a table as HTML, and as text where that is not read."""
    from IPython.display import display

    text = io.StringIO()
    plain = Console(file=text, width=WIDTH, force_jupyter=False, force_terminal=False)
    plain.print(table, markup=False)
    data = {"text/html": as_html(table), "text/plain": text.getvalue().rstrip()}
    display(data, raw=True)


def as_html(table: Table) -> str:
    """Writes a table of texts as HTML."""

    def row(kind: str, cells: tuple[Any, ...]) -> str:
        styles = [f'style="text-align: {x.justify}"' for x in table.columns]
        pairs = zip(styles, cells, strict=True)
        inner = (f"<{kind} {x}>{html.escape(str(cell))}</{kind}>" for x, cell in pairs)
        return f"<tr>{''.join(inner)}</tr>"

    rows = [
        row("td", cells)
        for cells in zip(*(column.cells for column in table.columns), strict=True)
    ]
    head = row("th", tuple(column.header for column in table.columns))
    captions = [f"<caption>{html.escape(str(table.title))}</caption>"]
    note = f"<p>{html.escape(str(table.caption))}</p>" if table.caption else ""
    return f"<table>{''.join([*captions, head, *rows])}</table>{note}"


def show_picture(path: Path) -> None:
    """Shows a PNG below what was printed."""
    from IPython.display import Image, display

    display(Image(filename=path))
