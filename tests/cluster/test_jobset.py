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

SET = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
(SETS,) = SET["spec"]["replicatedJobs"]
JOB = SETS["template"]["spec"]
POD = JOB["template"]["spec"]
(TRAIN,) = POD["containers"]
COORDINATOR = "jobset.sigs.k8s.io/coordinator"


def environ(container, index):
    """Variables of a container, as the JobSet's controller and the kubelet set them."""
    name, chosen = SET["metadata"]["name"], SET["spec"]["coordinator"]
    pod = f"{chosen['replicatedJob']}-{chosen['jobIndex']}-{chosen['podIndex']}"
    fields = {f"metadata.annotations['{COORDINATOR}']": f"{name}-{pod}.{name}"}
    given = {
        each["name"]: fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
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


def test_what_would_end_the_same_way_fails_and_all_else_starts_again():
    (rule,) = JOB["podFailurePolicy"]["rules"]
    (policy,) = SET["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and policy["action"] == "FailJobSet"
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]
    fatal = errors.ConfigError, errors.NonFiniteError, errors.StorageError
    assert rule["onExitCodes"] == {
        "containerName": TRAIN["name"],
        "operator": "In",
        "values": [error.exit_code for error in fatal],
    }
    # Kubernetes wants these for such rules.
    assert JOB["backoffLimit"] == 0 and POD["restartPolicy"] == "Never"


def test_its_pods_wait_for_each_other(address):
    (meet,) = POD["initContainers"]
    assert meet["image"] == TRAIN["image"]
    host, port = address.split(":")
    (code,) = meet["args"]
    runs = [
        subprocess.Popen(
            [sys.executable, *meet["command"][1:], code.replace("12355", port)],
            env=os.environ | environ(meet, index) | {"COORDINATOR": host},
            cwd=ROOT,
        )
        for index in (1, 0)
    ]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
