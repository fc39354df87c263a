"""The image's files, read; no container engine runs them here."""

import configparser
import hashlib
import re
import subprocess
import sys
import zipfile

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


def wheel(folder, text):
    """Makes a wheel of one module; returns its SHA-256."""
    file, info = folder / "one-1.0-py3-none-any.whl", "one-1.0.dist-info"
    files = {
        "one.py": text,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, "RECORD"])
        )
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("tampered", [False, True])
def test_a_wheel_with_another_hash_is_not_installed_as_the_image_installs(
    tmp_path, tampered
):
    """C48: offline, by the options of the image's own line."""
    lock = tmp_path / "lock.txt"
    lock.write_text(f"one==1.0 \\\n    --hash=sha256:{wheel(tmp_path, 'x = 1')}\n")
    if tampered:
        wheel(tmp_path, "x = 2")
    (line,) = re.findall(r"^RUN pip (install) (--require-hashes) (\S+) ", IMAGE, re.M)
    offline = ["--no-index", f"--find-links={tmp_path}", f"--target={tmp_path / 'to'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *line, str(lock), *offline],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is not tampered, done.stderr
    assert (tmp_path / "to/one.py").exists() is not tampered
    assert ("DO NOT MATCH THE HASHES" in done.stderr) is tampered


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
    assert re.search(r"^RUN pip install .* \. \\\n    && pip check$", IMAGE, re.M)
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
