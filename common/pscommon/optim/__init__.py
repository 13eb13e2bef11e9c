"""The optimizers that servers can run, and how to add one.

`register` is the public function. It adds an optimizer class of your own, with the formula that
servers carry out, in a module that `--optimizers MODULE` names on every ps-server and ps-worker
(docs/optimizers.md has an example).
"""

from pscommon.optim.elementwise import ElementwiseOptimizer
from pscommon.optim.lion import Lion
from pscommon.optim.registry import (
    KINDS,
    Check,
    Formula,
    OptimizerKind,
    OptimizerState,
    Rows,
    ScalarState,
    kind_of_class,
)
from pscommon.optim.torch_kinds import REFUSED_CLASSES
from pscommon.optim.trial import find_overflow, is_harmless
from pscommon.optim.user_defined import (
    check_same_optimizers,
    digest_of_user_defined,
    load_module,
    register,
)

__all__ = [
    "KINDS",
    "REFUSED_CLASSES",
    "Check",
    "ElementwiseOptimizer",
    "Formula",
    "Lion",
    "OptimizerKind",
    "OptimizerState",
    "Rows",
    "ScalarState",
    "check_same_optimizers",
    "digest_of_user_defined",
    "find_overflow",
    "is_harmless",
    "kind_of_class",
    "load_module",
    "register",
    "specs",
]
