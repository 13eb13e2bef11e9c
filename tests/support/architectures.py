"""Tensors of three well-known models, as papers, torchvision and Hugging Face define them."""

from collections.abc import Iterator

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def resnet50() -> Shapes:
    """He et al., 2015, as in torchvision: 25.6 M parameters, and BatchNorm's running statistics."""
    yield from _conv("conv1", 3, 64, 7)
    yield from _batch_norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for number, (before, after, side) in enumerate(
                ((inputs, width, 1), (width, width, 3), (width, 4 * width, 1)), start=1
            ):
                yield from _conv(f"{name}.conv{number}", before, after, side)
                yield from _batch_norm(f"{name}.bn{number}", after)
            if block == 0:
                yield from _conv(f"{name}.downsample.0", inputs, 4 * width, 1)
                yield from _batch_norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    yield from _linear("fc", 2048, 1000)


def vgg16() -> Shapes:
    """Simonyan and Zisserman, 2014, configuration D: 138.4 M parameters, of which one tensor has
    102.8 M.
    """
    inputs = 3
    for number, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield from _conv(f"features.{number}", inputs, width, 3)
        yield f"features.{number}.bias", (width,)
        inputs = width
    yield from _linear("classifier.0", 512 * 7 * 7, 4096)
    yield from _linear("classifier.3", 4096, 4096)
    yield from _linear("classifier.6", 4096, 1000)


def gpt2_small() -> Shapes:
    """Radford et al., 2019: 124.4 M parameters; the output layer is tied to the embedding of
    tokens.
    """
    width = 768
    yield "wte.weight", (50257, width)
    yield "wpe.weight", (1024, width)
    for block in range(12):
        name = f"h.{block}"
        yield from _norm(f"{name}.ln_1", width)
        yield from _linear(f"{name}.attn.c_attn", width, 3 * width)
        yield from _linear(f"{name}.attn.c_proj", width, width)
        yield from _norm(f"{name}.ln_2", width)
        yield from _linear(f"{name}.mlp.c_fc", width, 4 * width)
        yield from _linear(f"{name}.mlp.c_proj", 4 * width, width)
    yield from _norm("ln_f", width)


def model(shapes: Shapes) -> ModelSpec:
    """Return the model; running statistics are buffers, all other tensors trainable."""
    return ModelSpec(
        tuple(_tensor(name, shape) for name, shape in shapes), OptimizerSettings("sgd")
    )


def _tensor(name: str, shape: tuple[int, ...]) -> TensorSpec:
    if name.endswith("num_batches_tracked"):
        return TensorSpec(name, shape, "int64", "buffer")
    return TensorSpec(name, shape, "float32", "buffer" if ".running_" in name else "trainable")


def _conv(name: str, inputs: int, outputs: int, side: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs, side, side)


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _batch_norm(name: str, width: int) -> Shapes:
    yield from _norm(name, width)
    yield f"{name}.running_mean", (width,)
    yield f"{name}.running_var", (width,)
    yield f"{name}.num_batches_tracked", ()
