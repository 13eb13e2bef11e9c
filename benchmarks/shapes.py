"""Models to move: names and shapes only."""

TENSOR_COUNT = 160

Shapes = dict[str, tuple[int, ...]]


def resnet_like(numbers: int) -> Shapes:
    """160 tensors of about `numbers` in all, most of them in a few: as in ResNet-50, sizes grow
    with depth.

    ValueError for fewer than 60 000 numbers, which would leave tensors empty.
    """
    weights = [4.0 ** (index * 4 // (TENSOR_COUNT // 2)) for index in range(TENSOR_COUNT // 2)]
    vectors = {f"norm{index}": (256,) for index in range(TENSOR_COUNT // 2)}
    left = numbers - 256 * len(vectors)
    shapes = {f"conv{i}": (int(left * weight / sum(weights)),) for i, weight in enumerate(weights)}
    if left <= 0 or min(shapes.values()) < (1,):
        raise ValueError(f"{numbers} numbers are too few for {TENSOR_COUNT} tensors")
    return {**shapes, **vectors}


def equal(numbers: int, tensors: int) -> Shapes:
    """`tensors` tensors of the same size, of `numbers` in all (rounded down)."""
    return {f"tensor{index}": (numbers // tensors,) for index in range(tensors)}


def shapes(model: str, nbytes: int) -> Shapes:
    """model: "resnet", or how many equal tensors; float32."""
    return resnet_like(nbytes // 4) if model == "resnet" else equal(nbytes // 4, int(model))
