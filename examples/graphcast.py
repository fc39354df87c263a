"""GraphCast's batches, loss and names, with synthetic arrays: config, model and data.

    python -m haiku_template.train --config=examples/graphcast.py --workdir=runs/weather

Its own code (google-deepmind/weathernext) is in no package, so that `Net` is none of
it: a small net of the same three parts, grid to mesh, mesh, mesh to grid. With theirs
`model` wraps `construct_wrapped_graphcast(...)` as docs/published_models.md has it; all
else stays.

Shapes: B examples, 2 times of inputs, H latitudes, W longitudes, M nodes of the mesh.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data

LATITUDES, LONGITUDES = 8, 16
VARIABLES = ("2m_temperature", "mean_sea_level_pressure")


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps, config.batch_size, config.log_every = 60, 8, 20
    config.model = {"name": "examples.graphcast:model", "width": 32}
    config.model.remat = ("*mesh_gnn*",)
    config.task = {"name": "own_loss"}
    config.data = {"name": "examples.graphcast:data"}
    config.optimizer.learning_rate = 3e-3
    return config


class Net(hk.Module):
    """Tells the change of each variable at each place: [B, H * W, variables]."""

    def __init__(self, width: int, name: str = "net") -> None:
        super().__init__(name=name)
        self.width = width

    def __call__(self, grid: jax.Array) -> jax.Array:
        """Computes it of all that is known at a place, [B, H * W, C]."""

        def part(name: str, near: np.ndarray, x: jax.Array, outputs: int) -> jax.Array:
            mixed = jnp.einsum("mg,bgc->bmc", near, x)
            return hk.nets.MLP([self.width, outputs], name=name)(mixed)

        to_mesh, on_mesh = connections()
        mesh = part("grid2mesh_gnn", to_mesh, grid, self.width)
        mesh += part("mesh_gnn", on_mesh, mesh, self.width)
        back = part("mesh2grid_gnn", to_mesh.T * 4, mesh, self.width)
        both = jnp.concatenate([grid, back], axis=-1)
        return hk.Linear(len(VARIABLES), name="decoder")(both)


def connections() -> tuple[np.ndarray, np.ndarray]:
    """Averages from 2 x 2 places to a node, [M, H * W], and from its neighbours."""
    cell = np.arange(LATITUDES)[:, None] // 2 * (LONGITUDES // 2)
    cell = (cell + np.arange(LONGITUDES) // 2).reshape(-1)
    nodes = np.arange(cell.max() + 1)
    around = np.abs(nodes[:, None] - nodes)
    near = np.isin(around, (0, 1, LONGITUDES // 2)).astype(np.float32)
    to_mesh = (nodes[:, None] == cell).astype(np.float32) / 4
    return to_mesh, near / near.sum(axis=1, keepdims=True)


def model(num_outputs: int, axis_name: str | None, *, width: int) -> hk.Transformed:
    """Loss of each example, [B], and of each variable, as its `loss` gives them.

    A batch has the parts `inputs`, `targets` and `forcings`, each by variable.
    """
    del num_outputs, axis_name
    middle = (np.arange(LATITUDES) + 0.5) / LATITUDES - 0.5
    area = np.cos(np.pi * middle)[:, None]  # Of a place, by its latitude.

    def forward(batch: dict[str, dict[str, jax.Array]]) -> tuple[jax.Array, dict]:
        parts = batch["inputs"], batch["forcings"]
        planes = [
            x.reshape(len(x), -1, LATITUDES * LONGITUDES)
            for part in parts
            for x in part.values()
        ]
        grid = jnp.concatenate(planes, axis=1).swapaxes(1, 2)
        change = Net(width)(grid).swapaxes(1, 2)
        losses = {}
        for i, name in enumerate(VARIABLES):
            last = batch["inputs"][name][:, -1]
            said = last + change[:, i].reshape(last.shape)
            wrong = jnp.square(said - batch["targets"][name]) * (area / area.mean())
            losses[name] = wrong.mean(axis=(1, 2))
        return sum(losses.values()), losses

    return hk.transform(forward)


class Weather:
    """Waves that move eastward, and the light that comes with the time of the day."""

    def __init__(self, spec: BatchSpec, seed: int, num_batches: int) -> None:
        self.size, self.seed, self.num_batches = spec.batch_size, seed, num_batches

    def batch(self, index: int) -> dict[str, dict[str, np.ndarray]]:
        """Makes one batch of three parts, a function of `index` alone."""
        rng = np.random.default_rng((self.seed, index % self.num_batches))
        east = np.linspace(0, 2 * np.pi, LONGITUDES, endpoint=False)
        phase = rng.uniform(0, 2 * np.pi, (2, self.size, 1, 1))
        height = np.sin(np.linspace(0, np.pi, LATITUDES))[:, None]
        waves = {
            name: np.stack(
                [height * np.sin((i + 1) * east - phase[i] - 0.4 * t) for t in range(3)]
            ).astype(np.float32)
            for i, name in enumerate(VARIABLES)
        }
        light = np.broadcast_to(np.cos(east - phase[0]), waves[VARIABLES[0]][0].shape)
        return {
            "inputs": {k: x[:2].swapaxes(0, 1) for k, x in waves.items()},
            "targets": {k: x[2] for k, x in waves.items()},
            "forcings": {"toa_incident_solar_radiation": light.astype(np.float32)},
        }


def data(spec: BatchSpec) -> Data:
    """Makes training data of 100 batches, and two that are held out."""
    return Data(Weather(spec, 0, 100), Weather(spec, 1, 2))
