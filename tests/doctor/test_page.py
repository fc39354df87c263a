"""docs/doctor.md lists every id that an error may mention.

`python tests/doctor/test_page.py` writes the table of causes into it.
"""

import re
from pathlib import Path

from jax_doctor import STEPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/doctor.md"
MARKS = "<!-- causes -->\n", "<!-- end of causes -->\n"


def table():
    text = ""
    for step, causes in STEPS.items():
        text += f"\n**{step[0].upper()}{step[1:]}**\n\n| id | cause | what to do |\n"
        text += "|---|---|---|\n"
        for cause in causes:
            fix = cause.fix if isinstance(cause.fix, str) else cause.fix.__doc__
            words = (cause.id, cause.title, fix.strip().removesuffix("."))
            text += f"| {' | '.join(word.replace('|', '&#124;') for word in words)} |\n"
    return text + "\n"


def written(page):
    """The page with the causes of today."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]


def test_the_page_lists_the_causes_of_today():
    page = PAGE.read_text()
    assert page == written(page), "python tests/doctor/test_page.py writes it anew"


def test_every_id_that_the_package_mentions_is_on_the_page():
    packages = [ROOT / name for name in ("haiku_template", "jax_doctor")]
    files = {path for package in packages for path in package.rglob("*.py")}
    files -= {ROOT / "haiku_template/preflight/targets.py"}  # A10 is a card there.
    sources = "\n".join(path.read_text() for path in files)
    mentioned = set(re.findall(r"\bA\d{2,3}\b", sources))
    listed = set(re.findall(r"^\| (A\d+) \|", PAGE.read_text(), re.MULTILINE))
    assert mentioned == listed and len(listed) >= 60


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
