"""The image's files, read; no container engine runs them here."""

import configparser
import re

import pytest
from packaging.requirements import Requirement

from tests.runs import ROOT

LOCK = (ROOT / "launch/requirements-cuda13.txt").read_text()
IMAGE = (ROOT / "launch/Dockerfile").read_text()
HASHES = r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
PINNED = dict(re.findall(rf"^([\w.-]+)==([\w.]+){HASHES}", LOCK, re.M))
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = SETUP["options.extras_require"]


def test_each_line_is_a_version_with_its_hashes():
    rest = re.sub(rf"^[\w.-]+==[\w.]+{HASHES}", "", LOCK, flags=re.M)
    assert all(line.startswith("#") for line in rest.splitlines())
    assert "//" not in LOCK  # The same files, wherever they are fetched from.


ASKED = [
    *SETUP["options"]["install_requires"].split("\n"),
    *(
        line
        for name in re.findall(r"--extra (\w+)", LOCK)
        for line in EXTRAS[name].split("\n")
    ),
    *re.findall(r'requires = \["(.*)"\]', (ROOT / "pyproject.toml").read_text()),
]


@pytest.mark.parametrize("asked", [line for line in ASKED if line])
def test_what_the_package_asks_for_is_pinned(asked):
    asked = Requirement(asked)
    assert asked.specifier.contains(PINNED[asked.name.lower().replace("_", "-")])
    for extra in asked.extras:  # Of JAX: its plugin, of the same version.
        assert PINNED[f"{asked.name}-{extra}-plugin"] == PINNED[asked.name]


def test_the_image_has_what_the_lock_was_made_for():
    (python,) = re.findall(r"^ARG BASE=python:([\d.]+)-slim-\w+$", IMAGE, re.M)
    assert re.search(r"^FROM \$BASE$", IMAGE, re.M) and "BASE=python@sha256:" in IMAGE
    assert f"--python-version {python} " in LOCK
    assert "pip install --require-hashes --requirement launch/requirements" in IMAGE
    for line in re.findall(r"^COPY (.+) \S+$", IMAGE, re.M):
        assert all((ROOT / name).exists() for name in line.split())


def test_the_image_runs_as_a_user_and_not_as_root():
    (user,) = re.findall(r"^USER (.*)$", IMAGE, re.M)
    assert f"--uid 1000 --create-home {user} " in IMAGE
    assert IMAGE.rstrip().endswith(f"USER {user}")


def test_the_image_has_what_nccl_opens_for_infiniband():
    (installed,) = re.findall(r"apt-get install (.*?) \\\n    &&", IMAGE, re.S)
    asked = {"libibverbs1", "librdmacm1", "ibverbs-providers", "git"}
    assert asked <= set(installed.split())


def test_what_is_copied_is_sent_to_the_builder_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name.split("/")[0]
        for line in re.findall(r"^COPY (.+) \S+$", IMAGE, re.M)
        for name in line.split()
    }
    assert "*" in lines and sent == copied
