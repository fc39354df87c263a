"""The JobSet, read as Kubernetes reads it; no cluster runs it here."""

import copy
import os
import re
import subprocess
import sys

import pytest
import yaml

from haiku_template import cli, errors, train
from haiku_template.cluster import asked
from tests.runs import ROOT

SET, POLICY = yaml.safe_load_all((ROOT / "launch/jobset.yaml").read_text())
(SETS,) = SET["spec"]["replicatedJobs"]
JOB = SETS["template"]["spec"]
POD = JOB["template"]["spec"]
(TRAIN,) = POD["containers"]
COORDINATOR = "jobset.sigs.k8s.io/coordinator"
ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def environ(container, index, attempt=0):
    """Variables of a container, as the JobSet's controller and the kubelet set them."""
    name, chosen = SET["metadata"]["name"], SET["spec"]["coordinator"]
    pod = f"{chosen['replicatedJob']}-{chosen['jobIndex']}-{chosen['podIndex']}"
    fields = {f"metadata.annotations['{COORDINATOR}']": f"{name}-{pod}.{name}"}
    fields[ATTEMPT] = str(attempt)
    given = {
        each["name"]: each["value"]
        if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    return given | {"JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.parametrize("index", [0, 1])
def test_its_pods_know_their_place_in_the_run(index):
    variables = environ(TRAIN, index)
    words = [
        re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)
        for word in TRAIN["args"]
    ]
    assert TRAIN["command"] == ["python", "-m", train.__name__]
    assert (ROOT / words[0].removeprefix("--config=")).is_file()
    given = copy.deepcopy(train.FLAGS)
    given(["train", *words[1:]])  # Refuses flags that the command has not.
    told = {name: given[name].value for name in cli.PROCESSES}
    place = ("haiku-train-0-0.haiku:12355", JOB["completions"], index, None)
    assert asked(given.distributed, variables, **told) == place


def test_it_has_as_many_pods_as_processes():
    assert JOB["completionMode"] == "Indexed" and SETS["replicas"] == 1
    assert JOB["parallelism"] == JOB["completions"] == 2
    assert environ(TRAIN, 0)["NODES"] == str(JOB["completions"])


def test_what_would_end_the_same_way_fails_and_all_else_starts_again():
    (rule,) = JOB["podFailurePolicy"]["rules"]
    (policy,) = SET["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and policy["action"] == "FailJobSet"
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]
    fatal = errors.ConfigError, errors.NonFiniteError, errors.ReplayError
    fatal += (errors.StorageError, errors.MemoryFullError)
    assert rule["onExitCodes"] == {
        "operator": "In",
        "values": [error.exit_code for error in fatal],
    }
    # Kubernetes wants these for such rules.
    assert JOB["backoffLimit"] == 0 and POD["restartPolicy"] == "Never"


def test_its_pods_wait_for_each_other(tmp_path, address):
    (meet,) = POD["initContainers"]
    assert meet["image"] == TRAIN["image"]
    host, port = address.split(":")
    (code,) = meet["args"]
    more = {"COORDINATOR": host, "WORKDIR": str(tmp_path / "run")}
    runs = [
        subprocess.Popen(
            [sys.executable, *meet["command"][1:], code.replace("12355", port)],
            env=os.environ | environ(meet, index) | more,
            cwd=ROOT,
        )
        for index in (1, 0)
    ]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]


def test_three_starts_that_saved_nothing_new_are_the_last(tmp_path):
    (meet,) = POD["initContainers"]
    (code,) = meet["args"]
    steps = tmp_path / "checkpoints"
    code = code.replace("import meet", "import meet\nmeet = lambda *_: None")

    def start(attempt):
        more = {"WORKDIR": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *meet["command"][1:], code],
            env=os.environ | environ(meet, 0, attempt) | more,
            cwd=ROOT,
            capture_output=True,
        ).returncode

    assert [start(n) for n in range(3)] == [0, 0, 0]
    (steps / "10").mkdir(parents=True)
    assert [start(n) for n in range(3, 7)] == [0, 0, 0, 64]
    assert start(0) == 0  # Applied anew.


def test_it_asks_for_what_an_admin_asks_of_it():
    spec = TRAIN["resources"]
    assert {"cpu", "memory", "nvidia.com/gpu"} <= spec["requests"].keys()
    assert spec["requests"]["memory"] == spec["limits"]["memory"]
    context = POD["securityContext"]
    assert (
        context["runAsNonRoot"] and context["fsGroupChangePolicy"] == "OnRootMismatch"
    )
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (TRAIN, *POD["initContainers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
    variables = environ(TRAIN, 0)
    assert variables["NCCL_DEBUG"] == "WARN" and "NCCL_SOCKET_IFNAME" in variables
    mounts = {each["name"]: each["mountPath"] for each in TRAIN["volumeMounts"]}
    cache = variables["JAX_COMPILATION_CACHE_DIR"]
    assert cache.startswith(f"{mounts['runs']}/")  # Of all nodes.
    assert {each["key"] for each in POD["tolerations"]} == {"nvidia.com/gpu"}
    assert SET["spec"]["ttlSecondsAfterFinished"] > 0
    assert "kueue.x-k8s.io/queue-name" in SET["metadata"]["labels"]


def test_its_pods_alone_reach_each_other():
    labels = JOB["template"]["metadata"]["labels"]
    spec = POLICY["spec"]
    assert spec["podSelector"]["matchLabels"] == labels
    (rule,) = spec["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": labels}}]}
