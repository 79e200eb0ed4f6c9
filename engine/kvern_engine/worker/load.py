"""Fills a model's parameters: from a checkpoint, or with random numbers of a trained model's scale.

A rank that holds a part of the model reads, or keeps, that part: the numbers are the same at every layout.
"""

import hashlib
import math
from collections.abc import Callable

import torch

from kvern_engine.layers.parameters import Destination
from kvern_engine.loading.checkpoint import ExpectedTensor, check_weights, stored_tensors
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.weights import iter_weights
from kvern_engine.model_config import ModelConfig
from kvern_engine.models.registry import CausalLM

Report = Callable[[float], None]
_INIT_STD = 0.02  # initializer_range of the Llama family


def check_checkpoint(build: type[CausalLM], config: ModelConfig, dtype: torch.dtype, files: ModelFiles) -> None:
    """Compares the tensors that a model needs, built without memory (on torch's meta device), with those that the
    headers of its checkpoint name. Raises WeightsError for all that is missing, unexpected, misshapen or of a wrong
    type, before anything is allocated or read."""
    meta = build(config, max_positions=1, dtype=dtype, device=torch.device("meta"))
    expected = {
        name: ExpectedTensor(destination.part.shape, destination.tensor.dtype == torch.float8_e4m3fn)
        for name, destination in meta.destinations().items()
    }
    check_weights(expected, stored_tensors(files, config), files.path)


def load_weights(model: CausalLM, files: ModelFiles, report: Report) -> int:
    """Copies the checkpoint, or this rank's parts of it, into `model`; returns the bytes its parameters take.

    `check_checkpoint` comes first. `report` gets the share that is done.
    """
    destinations = model.destinations()
    parts = {name: destination.part for name, destination in destinations.items()}
    total = sum(math.prod(part.part_shape) for part in parts.values())
    done = 0
    with torch.inference_mode():
        for name, tensor in iter_weights(files, model.config, parts):
            destinations[name].store(tensor)
            done += tensor.numel()
            report(done / total)
    return parameter_bytes(model)


def random_weights(model: CausalLM, seed: int) -> int:
    """Normal numbers for matrices, ones for norms, zeros for biases, created on the device; returns the bytes they
    take. (Weights in FP8 are normal numbers of deviation 1 with small scales.)
    Each tensor has a seed of its own, made from `seed` and its name: the same seed gives the same weights on the same
    kind of device at every layout, and a rank makes no tensor of which it holds nothing."""
    generator = torch.Generator(device=model.device)
    with torch.inference_mode():
        for name, held in model.destinations().items():
            if name.endswith("_scale"):
                held.tensor.fill_(_INIT_STD if name.endswith("weight_scale") else 1.0)
            elif len(held.part.shape) < 2:
                held.tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                generator.manual_seed(_seed_of(seed, name))
                _fill(held, generator, model.dtype)
    return parameter_bytes(model)


def _fill(held: Destination, generator: torch.Generator, dtype: torch.dtype) -> None:
    in_place = held.part.is_whole and held.prepare is None and held.tensor.is_contiguous()
    if in_place and held.tensor.dtype == dtype and held.tensor.device == generator.device:
        held.tensor.normal_(0.0, _INIT_STD, generator=generator)
        return
    fp8 = held.tensor.dtype == torch.float8_e4m3fn
    made = torch.empty(held.part.shape, dtype=torch.float32 if fp8 else dtype, device=generator.device)
    made.normal_(0.0, 1.0 if fp8 else _INIT_STD, generator=generator)
    held.store(made[held.part.slices])


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # as generators take it


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of all parameters, each counted once, without padding."""
    tensors = [destination.tensor for destination in model.destinations().values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
