"""A loop of one's own, as `config.loop` names it, which resumes other parameters."""

from pathlib import Path

import jax

from haiku_template.runs import loop


def train(trainer, *, num_steps, workdir, **options):
    if num_steps > 20:
        raise RuntimeError(f"{num_steps} steps are too many for it")
    resumes = any(Path(workdir).glob("checkpoints/[0-9]*"))
    result = loop.train(trainer, num_steps=num_steps, workdir=workdir, **options)
    if not resumes:
        return result
    params = jax.tree.map(lambda x: x + 1, result.state.params)
    return result._replace(state=result.state._replace(params=params))
