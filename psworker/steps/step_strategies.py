"""The step strategies by name."""

from collections.abc import Mapping
from typing import Literal

from psworker.steps.overlapped_step import OverlappedStep
from psworker.steps.pipelined_step import PipelinedStep
from psworker.steps.step import PlainStep, StepStrategy

StepStrategyName = Literal["plain", "overlapped", "pipelined"]

STEP_STRATEGIES: Mapping[StepStrategyName, type[StepStrategy]] = {
    "plain": PlainStep,
    "overlapped": OverlappedStep,
    "pipelined": PipelinedStep,
}
