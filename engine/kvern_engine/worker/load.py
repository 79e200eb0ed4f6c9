"""Fills a model's parameters: from a checkpoint, or with random numbers of a trained model's scale."""

from collections.abc import Callable

import torch

from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.weights import check_weights, iter_weights, weight_shapes
from kvern_engine.models.registry import CausalLM

Report = Callable[[float], None]
_INIT_STD = 0.02  # initializer_range of the Llama family


def load_weights(model: CausalLM, files: ModelFiles, report: Report) -> int:
    """Copies the checkpoint into `model`; returns the bytes its parameters take.

    Names and shapes are compared first: WeightsError names what is missing, unexpected or misshapen before anything is
    read. `report` gets the share that is done.
    """
    destinations = model.destinations()
    shapes = weight_shapes(files, model.config)
    check_weights({name: tuple(tensor.shape) for name, tensor in destinations.items()}, shapes)
    total = sum(tensor.numel() for tensor in destinations.values())
    done = 0
    with torch.inference_mode():
        for name, tensor in iter_weights(files, model.config):
            destinations[name].copy_(tensor)
            done += tensor.numel()
            report(done / total)
    return parameter_bytes(model)


def random_weights(model: CausalLM, seed: int) -> int:
    """Normal numbers for matrices, ones for norms, zeros for biases, created on the device; returns the bytes they
    take. The same `seed` gives the same weights on the same kind of device."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    with torch.inference_mode():
        for name, tensor in model.destinations().items():
            if tensor.dim() > 1:
                tensor.normal_(0.0, _INIT_STD, generator=generator)
            elif name.endswith(".bias"):
                tensor.zero_()
            else:
                tensor.fill_(1.0)
    return parameter_bytes(model)


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of all parameters, each counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.destinations().values())
