"""Versions and requirements, compared as numbers: the small part that is needed."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPARE = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 11, 0) of 0.11.0.dev2+cuda."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def same(one: str, other: str) -> bool:
    """Whether two versions have the same numbers; zeros at the end do not count."""
    return _compare(numbers(one), "==", numbers(other))


def _compare(left: tuple[int, ...], sign: str, right: tuple[int, ...]) -> bool:
    length = max(len(left), len(right))
    pad = [part + (0,) * (length - len(part)) for part in (left, right)]
    return _COMPARE[sign](*pad)


class Requirement(NamedTuple):
    """One requirement of a package: `numpy>=2.1 ; extra == "x"`."""

    name: str
    bounds: tuple[tuple[str, str], ...]
    extra: str

    def allows(self, version: str) -> bool:
        """Whether a version lies within the bounds."""
        return within(version, self.bounds)

    def wanted(self) -> str:
        """The bounds as text: `>=9.8,<10.0`."""
        return ",".join(sign + version for sign, version in self.bounds)


def within(version: str, bounds: Iterable[tuple[str, str]]) -> bool:
    """Whether a version lies within all bounds."""
    return all(
        _compare(numbers(version), sign, numbers(bound)) for sign, bound in bounds
    )


def bounds(text: str) -> tuple[tuple[str, str], ...]:
    """The bounds in `>=9.8,<10.0`; wildcards and ~= are left out."""
    return tuple(re.findall(r"(>=|<=|==|!=|>|<)\s*(\d[\d.]*\d|\d)(?![\d.]*\*)", text))


def requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Reads the Requires-Dist lines of a package's metadata."""
    for line in lines:
        demand, _, marker = line.partition(";")
        match = re.match(r"\s*([\w.-]+)(?:\[[^\]]*\])?(.*)", demand)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        yield Requirement(name, bounds(match[2]), extra[1] if extra else "")
