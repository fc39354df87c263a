"""ResNet-20 on CIFAR-10, as in He et al. 2015 (arXiv:1512.03385, section 4.2).

    python -m haiku_template.train --config=configs/cifar10_resnet.py \
        --workdir=runs/cifar10 --config.data.path=DIRECTORY

The directory holds data_batch_1.bin to data_batch_5.bin and test_batch.bin.

Lab record: none yet on the real images (the paper's ResNet-20 reaches 91.25 % after
64,000 steps). Reading and training are tested on files of the same format.
"""

from ml_collections import config_dict

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps = 64000  # 164 epochs of 50,000 images.
    config.batch_size = 128
    config.log_every = 100
    config.eval_every = 2000
    config.save_every = 2000
    config.best_metric = "eval/accuracy"
    config.best_mode = "max"

    config.data = {"name": "cifar10", "path": "", "crop_and_flip": True}
    config.model = {
        "name": "resnet",
        "channels": (16, 32, 64),
        "blocks": 3,
        "norm_decay": 0.9,
    }
    config.optimizer.name = "sgd"
    config.optimizer.momentum = 0.9
    config.optimizer.learning_rate = 0.1
    config.optimizer.warmup_steps = 400
    config.optimizer.weight_decay = 1e-4
    return config
