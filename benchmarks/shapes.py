"""Models to move: names and shapes only."""

TENSORS = 160


def resnet_like(numbers: int) -> dict[str, tuple[int, ...]]:
    """160 tensors of about `numbers` in all, most of them in a few: as in ResNet-50, sizes grow with depth."""
    weights = [4.0 ** (index * 4 // (TENSORS // 2)) for index in range(TENSORS // 2)]
    vectors = {f"norm{index}": (256,) for index in range(TENSORS // 2)}
    left = numbers - 256 * len(vectors)
    shapes = {f"conv{i}": (int(left * weight / sum(weights)),) for i, weight in enumerate(weights)}
    return {**shapes, **vectors}
