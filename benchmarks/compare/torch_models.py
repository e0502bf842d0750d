"""The models of the comparison in PyTorch: one module for each stage, with the weights of the problem."""

from typing import Any

import problem
import torch
from torch import nn
from torch.nn import functional


def loss(name: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean loss of some rows."""
    if name == "toy":
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten().long())


class Stage(nn.Module):
    """One stage: activations (or, in the first stage of a GPT, bytes) in, activations (or logits) out."""

    def __init__(self, name: str, weights: Any):
        super().__init__()
        self.name = name
        self.weights = nn.ParameterDict({k: torch.from_numpy(v) for k, v in weights.items() if k != "layers"})
        self.layers = nn.ModuleList(Layer(layer) for layer in weights.get("layers", ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the stage to a microbatch."""
        if self.name == "toy":
            return torch.tanh(x @ self.weights["w"])
        if "embed" in self.weights:
            x = self.weights["embed"][x] + self.weights["positions"]
        for layer in self.layers:
            x = layer(x)
        return rms_norm(x, self.weights["norm"]) @ self.weights["head"] if "head" in self.weights else x


class Layer(nn.Module):
    """A layer of the GPT."""

    def __init__(self, weights: Any):
        super().__init__()
        self.weights = nn.ParameterDict({k: torch.from_numpy(v) for k, v in weights.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP."""
        w = self.weights
        qkv = (rms_norm(x, w["attention_norm"]) @ w["qkv"]).reshape(*x.shape[:2], 3, -1, problem.HEAD_SIZE)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + attended.reshape(x.shape) @ w["out"]
        return x + functional.gelu(rms_norm(x, w["mlp_norm"]) @ w["up"], approximate="tanh") @ w["down"]


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x divided by its root mean square over the last axis, times a learned scale."""
    return functional.rms_norm(x, x.shape[-1:], scale, 1e-6)
