"""The step strategies by name."""

from collections.abc import Mapping
from typing import Literal

from psworker.optim.overlapped_step import OverlappedStep
from psworker.optim.pipelined_step import PipelinedStep
from psworker.optim.step import PlainStep, StepStrategy

StepStrategyName = Literal["plain", "overlapped", "pipelined"]

STEP_STRATEGIES: Mapping[StepStrategyName, type[StepStrategy]] = {
    "plain": PlainStep,
    "overlapped": OverlappedStep,
    "pipelined": PipelinedStep,
}
