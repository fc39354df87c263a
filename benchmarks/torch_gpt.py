"""A GPT's training step in PyTorch, for `benchmarks.gpt_on_cpu`; needs PyTorch alone.

The same sizes, losses and optimizer as `configs/gpt_bytes.py`. For each number of steps
that it reads it prints a line: wall seconds, CPU seconds, last loss.
"""

import sys
import time

import torch
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH_SIZE, LAYERS = 256, 128, 4, 128, 16, 4


class Block(torch.nn.Module):
    """Attention and an MLP with residuals: [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds attention's outputs, then the MLP's."""
        heads = (BATCH_SIZE, CONTEXT, HEADS, WIDTH // HEADS)
        projected = self.qkv(self.norm_1(x)).split(WIDTH, -1)
        arrays = (y.view(heads).transpose(1, 2) for y in projected)
        y = functional.scaled_dot_product_attention(*arrays, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(x.shape))
        y = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + self.down(y)


class GPT(torch.nn.Module):
    """The model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, averaged over [B, T] tokens."""
        x = self.blocks(self.embed(tokens) + self.positions.weight)
        logits = self.norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def main() -> None:
    """Runs as many steps as each line of the input says."""
    torch.manual_seed(0)
    model, shape = GPT(), (BATCH_SIZE, CONTEXT)
    tokens, labels = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        begun = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            loss = model(tokens, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        value = loss.item()
        now = time.perf_counter(), time.process_time()
        print(now[0] - begun[0], now[1] - begun[1], value, flush=True)


if __name__ == "__main__":
    main()
