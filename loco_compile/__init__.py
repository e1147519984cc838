"""A torch.compile backend that sends FSDP2 gradients as 4-bit codes with error feedback."""

from .agree import PlanMismatchError
from .backend import LoCoBackend, loco_backend
from .config import LoCoConfig
from .guard import UncapturedError
from .report import Report, explain
from .state import ErrorState, error_state

__all__ = [
    "ErrorState",
    "LoCoBackend",
    "LoCoConfig",
    "PlanMismatchError",
    "Report",
    "UncapturedError",
    "error_state",
    "explain",
    "loco_backend",
]
__version__ = "0.1.0"
