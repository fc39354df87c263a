"""Causes in the installed packages, read from their metadata: nothing is imported."""

from jax_doctor import libraries
from jax_doctor.machine import Machine, Requirement, numbers
from jax_doctor.table import Facts, Sign, Signs, step
from jax_doctor.variables import hides_the_hint

cause = step("installed packages")

# Packages that are not JAX's own and must fit it.
BESIDE = ("python", "numpy", "scipy")
SEGMENTATION_FAULT = (-11, 139)


def install_command(machine: Machine) -> str:
    """`pip install -U "jax[cuda13]"`; cuda12 where the driver is older than 580."""
    driver = machine.driver_branch()
    if driver:
        return f'pip install -U "jax[cuda{12 if driver < 580 else 13}]"'
    return 'pip install -U "jax[cuda13]" (driver 580 or newer) or "jax[cuda12]" (525)'


def _unset_and_install(machine: Machine) -> str:
    """`unset JAX_PLATFORMS`, and the command of A01."""
    return f"unset JAX_PLATFORMS; {install_command(machine)}"


def _align(machine: Machine) -> str:
    """`pip install -U` of jax, jaxlib and the plugin, all in one version."""
    # A plugin is released with each jaxlib, and the rest fits this one already.
    version = machine.version("jaxlib")
    family = (machine.cuda_families() or ["13"])[-1]
    return (
        f'pip install -U "jax[cuda{family}]=={version}" jaxlib=={version} '
        f"jax-cuda{family}-plugin=={version} jax-cuda{family}-pjrt=={version}"
    )


def _plugin_parts(machine: Machine) -> dict[str, str]:
    """Installed parts of CUDA plugins, name to version."""
    families, installed = machine.cuda_families(), machine.distributions
    names = [f"jax-cuda{f}-{half}" for f in families for half in ("plugin", "pjrt")]
    return {name: installed[name] for name in names if name in installed}


def _halves(machine: Machine, present: str, absent: str) -> list[str]:
    """CUDAs of which one half of the plugin is there and the other is not."""
    installed = _plugin_parts(machine)
    return [
        family
        for family in machine.cuda_families()
        if f"jax-cuda{family}-{present}" in installed
        and f"jax-cuda{family}-{absent}" not in installed
    ]


@cause("A05", fix="pip install -U jax", scope="all")
def _absent(machine: Machine, facts: Facts) -> Signs:
    """JAX or its compiled half is not installed."""
    missing = [n for n in ("jax", "jaxlib") if n not in machine.distributions]
    if missing:
        yield f"{' and '.join(missing)} not installed"


@cause("A04", fix="pip install -U jax jaxlib", scope="all")
def _jax_and_jaxlib(machine: Machine, facts: Facts) -> Signs:
    """The installed jax and jaxlib do not fit together."""
    jax, jaxlib = machine.version("jax"), machine.version("jaxlib")
    if jax and numbers(jaxlib) > numbers(jax):
        yield f"jaxlib {jaxlib} is newer than jax {jax}"
    for need in machine.requirements("jax") if jax and jaxlib else ():
        if need.name == "jaxlib" and not need.extra and not need.allows(jaxlib):
            yield f"jax {jax} needs jaxlib{need.bounds} and found {jaxlib}"


@cause(
    "A15",
    fix="use Python 3.12 or newer with NumPy 2.2, or pip install "
    '"jax==0.10.2" "jaxlib==0.10.2"',
    scope="all",
)
def _python(machine: Machine, facts: Facts) -> Signs:
    """JAX is too new for this Python or NumPy."""
    python = ".".join(map(str, machine.python))
    versions = {**machine.distributions, "python": python}
    for package in machine.requires:
        for need in machine.requirements(package):
            counts = need.name in BESIDE and not need.extra
            version = versions.get(need.name) if counts else None
            if version and not need.allows(version):
                title = f"{package} {machine.version(package)}"
                yield f"{title} needs {need.name}{need.bounds} and found {version}"


@cause("A19", fix="pip install -U dm-haiku", scope="all")
def _old_haiku(machine: Machine, facts: Facts) -> Signs:
    """The installed dm-haiku is older than JAX."""
    haiku, jax = machine.version("dm-haiku"), machine.version("jax")
    if haiku and numbers(haiku) < (0, 0, 14) and numbers(jax) >= (0, 6):
        yield f"dm-haiku {haiku} uses jax.core.JaxprEqn, which jax {jax} lacks"


@cause(
    "A13",
    fix="align the versions of jax, jaxlib and the plugin, or uninstall the plugin",
    scope="all",
)
def _crash(machine: Machine, facts: Facts) -> Signs:
    """JAX crashes at its start, as a new CUDA plugin beside an old jaxlib makes it."""
    jaxlib = machine.version("jaxlib")
    if jaxlib and numbers(jaxlib) < (0, 4, 32):
        for name, version in _plugin_parts(machine).items():
            if numbers(version) >= (0, 4, 32):
                yield Sign(f"{name} {version} with jaxlib {jaxlib}", _align(machine))
    start = facts.jax and facts.failed_start(machine)
    if start and start.returncode in SEGMENTATION_FAULT:
        yield "starting JAX ended in a segmentation fault"


@cause("A10", fix="uninstall one of them")
def _two_families(machine: Machine, facts: Facts) -> Signs:
    """Two CUDA plugins are installed, and one wins at random."""
    names = [f"jax-cuda{family}-plugin" for family in ("12", "13")]
    if all(name in machine.distributions for name in names):
        complete = [libraries.complete(machine, family) for family in ("12", "13")]
        old_driver = 0 < machine.driver_branch() < 580
        # The one goes that lacks its wheels, or its driver.
        drop = "13" if old_driver or complete == [True, False] else "12"
        text = " and ".join(f"{name} {machine.version(name)}" for name in names)
        yield Sign(text, f"pip uninstall -y jax-cuda{drop}-plugin jax-cuda{drop}-pjrt")


@cause("A03", fix=_align)
def _plugin_version(machine: Machine, facts: Facts) -> Signs:
    """The CUDA plugin and jaxlib have different versions."""
    jaxlib = machine.version("jaxlib")
    first = (_jax_and_jaxlib, _crash, _two_families)
    if not jaxlib or any(detect(machine, facts) for detect in first):
        return
    for name, version in _plugin_parts(machine).items():
        if not Requirement(name, f"=={jaxlib}").allows(version):
            yield f"{name} {version} with jaxlib {jaxlib}: they must be equal"


@cause("A11", fix=_align)
def _pjrt_alone(machine: Machine, facts: Facts) -> Signs:
    """Half of the CUDA plugin is missing."""
    for family in _halves(machine, "pjrt", "plugin"):
        yield f"jax-cuda{family}-pjrt is installed without jax-cuda{family}-plugin"


@cause("A36", fix="pip uninstall -y jax-metal", scope="default")
def _metal(machine: Machine, facts: Facts) -> Signs:
    """The package jax-metal is no longer maintained and breaks JAX."""
    version, jax = machine.version("jax-metal"), machine.version("jax")
    if version and numbers(jax) >= (0, 5, 1):
        yield f"jax-metal {version} with jax {jax}"


@cause("A14", fix='conda install "jaxlib=*=*cuda*" jax -c conda-forge')
def _conda_cpu(machine: Machine, facts: Facts) -> Signs:
    """Conda chose the CPU build of jaxlib."""
    build = machine.conda_build("jaxlib")
    if build and machine.nodes() and not machine.has_cuda():
        yield f"conda installed jaxlib {build}, a build without cuda"


@cause("A02", fix=_unset_and_install)
def _hidden_hint(machine: Machine, facts: Facts) -> Signs:
    """JAX is installed without CUDA, and JAX_PLATFORMS hides its hint."""
    if hides_the_hint(machine) and not machine.conda_build("jaxlib"):
        yield f"JAX_PLATFORMS=cpu, {machine.nodes()[0]} exists, and no CUDA plugin does"


@cause("A01", fix=install_command)
def _no_plugin(machine: Machine, facts: Facts) -> Signs:
    """JAX is installed without CUDA on a machine with a card."""
    nodes = machine.nodes()
    if not nodes or hides_the_hint(machine) or machine.conda_build("jaxlib"):
        return
    for family in _halves(machine, "plugin", "pjrt"):
        half = f"jax-cuda{family}-plugin without jax-cuda{family}-pjrt"
        yield Sign(f"{nodes[0]} exists, and there is {half}", _align(machine))
    if not machine.has_cuda():
        neither = "neither jax-cuda12-plugin nor jax-cuda13-plugin"
        yield f"{nodes[0]} exists, and {neither}"
