"""Fills a model's parameters: from a checkpoint, or with random numbers of a trained model's scale.

A rank that holds a part of the model reads, or keeps, that part: the numbers are the same at every layout.
"""

import math
from collections.abc import Callable

import torch

from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.weights import WeightsError, check_weights, iter_weights, weight_shapes
from kvern_engine.models.registry import CausalLM

Report = Callable[[float], None]
_INIT_STD = 0.02  # initializer_range of the Llama family


def load_weights(model: CausalLM, files: ModelFiles, report: Report) -> int:
    """Copies the checkpoint, or this rank's parts of it, into `model`; returns the bytes its parameters take.

    Names and shapes are compared first: WeightsError names what is missing, unexpected or misshapen before anything is
    read. `report` gets the share that is done.
    """
    destinations = model.destinations()
    check_weights(_shapes_of_all(model), weight_shapes(files, model.config))
    parts = {name: destination.part for name, destination in destinations.items()}
    total = sum(math.prod(part.part_shape) for part in parts.values())
    done = 0
    with torch.inference_mode():
        for name, tensor in iter_weights(files, model.config, parts):
            if destinations[name].tensor.dtype == torch.float8_e4m3fn != tensor.dtype:
                raise WeightsError(f"{files.path}: {name} is {tensor.dtype}; quantization_config says float8_e4m3fn")
            destinations[name].tensor.copy_(tensor)
            done += tensor.numel()
            report(done / total)
    return parameter_bytes(model)


def random_weights(model: CausalLM, seed: int) -> int:
    """Normal numbers for matrices, ones for norms, zeros for biases, created on the device; returns the bytes they
    take. (Weights in FP8 are normal numbers of deviation 1 with small scales.)
    The same `seed` gives the same weights on the same kind of device, whatever part of them is kept."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    destinations = model.destinations()
    with torch.inference_mode():
        for name, shape in _shapes_of_all(model).items():
            held = destinations.get(name)
            if name.endswith("_scale"):
                if held is not None:
                    held.tensor.fill_(_INIT_STD if name.endswith("weight_scale") else 1.0)
            elif held is not None and held.tensor.dtype == torch.float8_e4m3fn:
                held.tensor.copy_(torch.randn(held.part.part_shape, generator=generator, device=model.device))
            elif len(shape) > 1:
                if held is not None and held.part.is_whole:
                    held.tensor.normal_(0.0, _INIT_STD, generator=generator)
                else:  # all of it all the same: the numbers of what follows depend on it
                    made = torch.empty(shape, dtype=model.dtype, device=model.device)
                    made.normal_(0.0, _INIT_STD, generator=generator)
                    if held is not None:
                        held.tensor.copy_(made[held.part.slices])
            elif held is not None:
                held.tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
    return parameter_bytes(model)


def _shapes_of_all(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the checkpoint, whatever part of them `model` holds."""
    whole = type(model)(model.config, max_positions=1, dtype=model.dtype, device=torch.device("meta"))
    return {name: destination.part.shape for name, destination in whole.destinations().items()}


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of all parameters, each counted once, without padding."""
    tensors = [destination.tensor for destination in model.destinations().values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
