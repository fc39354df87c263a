"""Runs that tests share: what a finished run's directory gives on some devices."""

from haiku_template.runs import Run


def evaluated(workdir, devices, which="latest"):
    """Step and metrics of a checkpoint."""
    run = Run.open(workdir, devices, which)
    return run.step, run.evaluate()
