"""The environment with the real wheels, on a machine with a card, to be broken.

Each process has a mount namespace of its own: with device nodes, with a driver of our
own making, and with the installed packages under a layer that takes every change.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
# Wheels that the environment does not hold: fetched once.
WHEELS = Path(sys.prefix, "wheels")
UNSHARE = ["unshare", "--mount", *["--map-root-user"] * bool(os.geteuid())]
# A CUDA toolkit of this machine would stand in for what a test takes away.
INSIDE = """
set -e
folder=$1; site=$2; changes=$3; shift 3
mount --rbind /dev "$folder/dev"
mount -t tmpfs tmpfs /dev
for name in null zero random urandom tty full shm fd; do
  ln -s "$folder/dev/$name" /dev
done
touch /dev/nvidia0 /dev/nvidiactl /dev/nvidia-uvm
for toolkit in /usr/local/cuda*/; do
  if [ -d "$toolkit" ] && [ ! -L "${toolkit%/}" ]; then
    mount -t tmpfs tmpfs "$toolkit"
  fi
done
mount -t overlay overlay \\
  -o "lowerdir=$site,upperdir=$changes/files,workdir=$changes/work" "$site"
exec "$@"
"""
# What can be told from the words of JAX alone, where every file looks right.
WORDS = """
import dataclasses, json
from jax_doctor import Facts, Machine, diagnose
from jax_doctor.children import DriverResult, probe_jax
here = Machine.here()
jax = probe_jax(120, here.environ)
parts = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
same = here.distributions | {name: here.distributions["jax"] for name in parts}
bare = dataclasses.replace(here, requires={}, distributions=same)
driver = DriverResult(0, version=13000, count=1)
found = diagnose(bare, Facts("gpu", driver, jax))[0]
print(json.dumps([found.id, found.found, jax.child.errors]))
"""


class Environment:
    """The Python of this process, beside a card, with changes that vanish.

    Attributes:
      folder: holds the driver, and the device nodes of the machine itself.
      changes: what is different from the packages that were installed.
    """

    def __init__(self, folder, changes):
        self.folder, self.changes = folder, changes
        for name in ("files", "work"):
            (changes / name).mkdir()

    def shell(self, *command, **variables):
        """Runs a command; the driver starts and counts one device."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_", "CUDA_", "NVIDIA_", "STUB_"))
        }
        driver = {"LD_LIBRARY_PATH": f"{self.folder}/driver", "STUB_COUNT": "1"}
        inside = ["bash", "-c", INSIDE, "bash", self.folder, SITE, self.changes]
        return subprocess.run(
            [*UNSHARE, *inside, *command],
            cwd=ROOT,
            env={**clean, **driver, **variables},
            capture_output=True,
            text=True,
            timeout=1200,
        )

    def run(self, *arguments, **variables):
        """Runs Python."""
        return self.shell(sys.executable, *arguments, **variables)

    def doctor(self, **variables):
        """The report of the doctor who was asked for a GPU."""
        command = ("-m", "haiku_template.doctor", "--device=gpu", "--json")
        done = self.run(*command, **variables)
        assert done.returncode == 69, done.stderr
        return json.loads(done.stdout)

    def words(self, **variables):
        """The id and the finding from JAX's own words alone, and these words."""
        done = self.run("-c", WORDS, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def pip(self, *arguments):
        """Changes what is installed."""
        done = self.run("-m", "pip", *arguments)
        assert done.returncode == 0, done.stderr


def library(name):
    """The file of one of the CUDA libraries: `libcudnn.so`."""
    return next(SITE.glob(f"nvidia/*/lib/{name}*"))


def wheel(name, version):
    """The file of a wheel that the environment does not hold."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(WHEELS.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--dest", WHEELS, f"{name}=={version}"]
        subprocess.run(pip, check=True, timeout=1200)
    return next(WHEELS.glob(pattern))


def need_a_namespace(environment):
    """Skips, with a sentence, where no process may have mounts of its own."""
    done = environment.shell("true")
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"this machine allows no mounts of one's own: {words}")
