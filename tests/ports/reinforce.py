"""An agent that plays Catch: a loop of its own, on the template's devices and files."""

import sys
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.devices import DeviceManager, mean_over
from haiku_template.storage import Checkpoints

ROWS, COLUMNS, GAMES = 5, 5, 64
POLICY = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 3])(x)))
ADAM = optax.adam(5e-3)


def observe(ball, row, paddle):
    """Boards of many games as vectors: [B, ROWS * COLUMNS]."""
    board = np.zeros((len(ball), ROWS, COLUMNS), np.float32)
    board[np.arange(len(ball)), row, ball] = 1
    board[np.arange(len(ball)), ROWS - 1, paddle] = 1
    return board.reshape(len(ball), -1)


def init():
    params = POLICY.init(jax.random.key(0), jnp.zeros((1, ROWS * COLUMNS)))
    return {"params": params, "opt_state": ADAM.init(params)}


# The template.
def main(devices: DeviceManager, workdir: Path, num_steps: int) -> float:
    """Plays and learns on from the newest checkpoint; returns the last mean reward."""

    def update(state, batch):
        def loss(params):
            log_p = jax.nn.log_softmax(POLICY.apply(params, batch["seen"]))
            chosen = jnp.take_along_axis(log_p, batch["action"][:, None], axis=1)
            return -jnp.mean(chosen[:, 0] * batch["reward"])

        grads = mean_over(devices.axis_name, jax.grad(loss)(state["params"]))
        updates, opt_state = ADAM.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    act = devices.compile_per_example(POLICY.apply)
    learn = devices.compile(update)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        start, state = checkpoints.latest or 0, devices.init(init)
        if start:
            state = checkpoints.restore(start, devices.abstract(init))
        for step in range(start, num_steps):
            rng = np.random.default_rng(step)
            ball, paddle = rng.integers(COLUMNS, size=(2, GAMES))
            played = []
            for row in range(ROWS - 1):
                seen = observe(ball, row, paddle)
                logits = devices.fetch(act(state["params"], devices.shard(seen)))
                action = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
                paddle = np.clip(paddle + action - 1, 0, COLUMNS - 1)
                played.append({"seen": seen, "action": action.astype(np.int32)})
            reward = np.where(paddle == ball, 1, -1).astype(np.float32)
            batch = jax.tree.map(lambda *x: np.concatenate(x), *played)
            batch["reward"] = np.tile(reward - reward.mean(), ROWS - 1)
            state = learn(state, devices.shard(batch))
        checkpoints.save(num_steps, state, None)
    return float(reward.mean())


if __name__ == "__main__":
    print(main(DeviceManager.create(), Path(sys.argv[1]), 300))
