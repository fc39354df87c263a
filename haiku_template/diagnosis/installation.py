"""Causes in the installed packages, read from their metadata: nothing is imported."""

from haiku_template.diagnosis import libraries, versions
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.platforms import hides_the_hint
from haiku_template.diagnosis.rows import (
    Cause,
    Facts,
    cuda_families,
    has_cuda,
    install_command,
)


def _absent(machine: Machine, facts: Facts) -> str | None:
    missing = [n for n in ("jax", "jaxlib") if n not in machine.distributions]
    return f"{' and '.join(missing)} not installed" if missing else None


def _jax_and_jaxlib(machine: Machine, facts: Facts) -> str | None:
    jax = machine.distributions.get("jax", "")
    jaxlib = machine.distributions.get("jaxlib", "")
    if not (jax and jaxlib):
        return None
    if versions.numbers(jaxlib) > versions.numbers(jax):
        return f"jaxlib {jaxlib} is newer than jax {jax}"
    for need in versions.requirements(machine.requires.get("jax", ())):
        if need.name == "jaxlib" and not need.extra and not need.allows(jaxlib):
            return f"jax {jax} needs jaxlib{need.wanted()} and found {jaxlib}"
    return None


def _python(machine: Machine, facts: Facts) -> str | None:
    python = ".".join(str(part) for part in machine.python)
    for name, wanted in machine.requires_python.items():
        if not versions.within(python, versions.bounds(wanted)):
            version = machine.distributions.get(name, "")
            return f"{name} {version} needs Python {wanted} and this is {python}"
    for need in versions.requirements(machine.requires.get("jax", ())):
        found = machine.distributions.get(need.name)
        if need.name in ("numpy", "scipy") and found and not need.allows(found):
            return f"jax needs {need.name}{need.wanted()} and found {found}"
    return None


def _old_haiku(machine: Machine, facts: Facts) -> str | None:
    haiku = machine.distributions.get("dm-haiku", "")
    jax = machine.distributions.get("jax", "")
    if not haiku or versions.numbers(jax) < (0, 6):
        return None
    if versions.numbers(haiku) < (0, 0, 14):
        return f"dm-haiku {haiku} uses jax.core.JaxprEqn, which jax {jax} lacks"
    return None


def _jaxline(machine: Machine, facts: Facts) -> str | None:
    jax = machine.distributions.get("jax", "")
    if "jaxline" in machine.distributions and versions.numbers(jax) >= (0, 6):
        return f"jaxline calls jax.tree_map, which jax {jax} lacks"
    return None


def _plugin_parts(machine: Machine) -> dict[str, str]:
    return {
        f"jax-cuda{family}-{part}": machine.distributions[f"jax-cuda{family}-{part}"]
        for family in cuda_families(machine)
        for part in ("plugin", "pjrt")
        if f"jax-cuda{family}-{part}" in machine.distributions
    }


def _crashing_plugin(machine: Machine, facts: Facts) -> str | None:
    jaxlib = machine.distributions.get("jaxlib", "")
    if not jaxlib or versions.numbers(jaxlib) >= (0, 4, 32):
        return None
    for name, version in _plugin_parts(machine).items():
        if versions.numbers(version) >= (0, 4, 32):
            return f"{name} {version} with jaxlib {jaxlib}"
    return None


def _plugin_version(machine: Machine, facts: Facts) -> str | None:
    jaxlib = machine.distributions.get("jaxlib", "")
    others = (_jax_and_jaxlib, _crashing_plugin, _two_families)
    if not jaxlib or any(detect(machine, facts) for detect in others):
        return None
    for name, version in _plugin_parts(machine).items():
        if not versions.same(version, jaxlib):
            return f"{name} {version} with jaxlib {jaxlib}: they must be equal"
    return None


def _align(machine: Machine) -> str:
    # A plugin is released with each jaxlib, and the rest fits this one already.
    version = machine.distributions.get("jaxlib", "")
    family = (cuda_families(machine) or ["13"])[-1]
    return (
        f'pip install -U "jax[cuda{family}]=={version}" jaxlib=={version} '
        f"jax-cuda{family}-plugin=={version} jax-cuda{family}-pjrt=={version}"
    )


def _add_cuda(machine: Machine) -> str:
    return _align(machine) if cuda_families(machine) else install_command(machine)


def _two_families(machine: Machine, facts: Facts) -> str | None:
    both = [f"jax-cuda{f}-plugin" for f in ("12", "13")]
    if all(name in machine.distributions for name in both):
        return " and ".join(f"{n} {machine.distributions[n]}" for n in both)
    return None


def _one_family(machine: Machine) -> str:
    old_driver = "cuda12" in install_command(machine).split(" or ")[0]
    only_twelve = libraries.complete(machine, "12") > libraries.complete(machine, "13")
    drop = "13" if old_driver or only_twelve else "12"
    return f"pip uninstall -y jax-cuda{drop}-plugin jax-cuda{drop}-pjrt"


def _pjrt_alone(machine: Machine, facts: Facts) -> str | None:
    for family in cuda_families(machine):
        names = (f"jax-cuda{family}-pjrt", f"jax-cuda{family}-plugin")
        if names[1] not in machine.distributions:
            return f"{names[0]} is installed without {names[1]}"
    return None


def _plugin_alone(machine: Machine) -> str:
    for family in cuda_families(machine):
        if f"jax-cuda{family}-pjrt" not in machine.distributions:
            return f"jax-cuda{family}-plugin without jax-cuda{family}-pjrt"
    return ""


def _metal(machine: Machine, facts: Facts) -> str | None:
    version = machine.distributions.get("jax-metal")
    jax = machine.distributions.get("jax", "")
    if version and versions.numbers(jax) >= (0, 5, 1):
        return f"jax-metal {version} with jax {jax}"
    return None


def _conda_cpu(machine: Machine, facts: Facts) -> str | None:
    build = machine.conda_build("jaxlib")
    if build and machine.nodes() and not has_cuda(machine):
        return f"conda installed jaxlib {build}, a build without cuda"
    return None


def _no_plugin(machine: Machine, facts: Facts) -> str | None:
    nodes = machine.nodes()
    if not nodes or hides_the_hint(machine) or machine.conda_build("jaxlib"):
        return None
    if _plugin_alone(machine):
        return f"{nodes[0]} exists, and there is {_plugin_alone(machine)}"
    if has_cuda(machine):
        return None
    return f"{nodes[0]} exists, and neither jax-cuda12-plugin nor jax-cuda13-plugin"


def _hidden_hint(machine: Machine, facts: Facts) -> str | None:
    if not hides_the_hint(machine) or machine.conda_build("jaxlib"):
        return None
    return f"JAX_PLATFORMS=cpu, {machine.nodes()[0]} exists, and no CUDA plugin does"


ROWS = (
    Cause(
        "A05",
        "JAX or its compiled half is not installed",
        _absent,
        "pip install -U jax",
        asked="all",
    ),
    Cause(
        "A04",
        "jax and jaxlib do not fit together",
        _jax_and_jaxlib,
        "pip install -U jax jaxlib",
        asked="all",
    ),
    Cause(
        "A15",
        "JAX is too new for this Python or NumPy",
        _python,
        "use Python 3.12 or newer with NumPy 2.2, or pip install "
        '"jax==0.10.2" "jaxlib==0.10.2"',
        asked="all",
    ),
    Cause(
        "A19",
        "dm-haiku is older than JAX",
        _old_haiku,
        "pip install -U dm-haiku",
        asked="all",
    ),
    Cause(
        "A13",
        "a new CUDA plugin beside an old jaxlib crashes the process",
        _crashing_plugin,
        _align,
        asked="all",
    ),
    Cause(
        "A10",
        "two CUDA plugins are installed, and one wins at random",
        _two_families,
        _one_family,
    ),
    Cause(
        "A03",
        "the CUDA plugin and jaxlib have different versions",
        _plugin_version,
        _align,
    ),
    Cause("A11", "half of the CUDA plugin is missing", _pjrt_alone, _align),
    Cause(
        "A36",
        "jax-metal is no longer maintained and breaks JAX",
        _metal,
        "pip uninstall -y jax-metal",
        asked="default",
    ),
    Cause(
        "A14",
        "conda chose the CPU build of jaxlib",
        _conda_cpu,
        'conda install "jaxlib=*=*cuda*" jax -c conda-forge',
    ),
    Cause(
        "A02",
        "JAX is installed without CUDA, and JAX_PLATFORMS hides its hint",
        _hidden_hint,
        lambda machine: "unset JAX_PLATFORMS; " + install_command(machine),
    ),
    Cause(
        "A01",
        "JAX is installed without CUDA on a machine with a card",
        _no_plugin,
        _add_cuda,
    ),
    Cause(
        "A19",
        "jaxline is older than JAX",
        _jaxline,
        "pip uninstall -y jaxline, if nothing needs it",
        severity="warning",
        asked="all",
    ),
)
